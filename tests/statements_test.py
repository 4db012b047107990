"""Statements of one meaning are unified, those of two never are."""

import itertools
import random
import unicodedata

import pytest

from kvgraft_jax import errors
from kvgraft_jax import parameters
from kvgraft_jax import statements


@pytest.mark.parametrize('texts', [
    ('What is 2 + 2?', ' What  is\u00a02 + 2? \n', 'What is 2 + 2?\r\n',
     'What is\u20032 + ２?'),
    ('Is 5 - 3 > -2?', 'Is 5 \u2212 3 > \u22122?', 'Is 5 - 3 > \u20132?'),
    ("Ada's book", 'Ada\u2019s book'),
    ('the word "to  be"', 'the word \u201cto  be\u201d'),
    ('Find $x$ if $x+1=3$.', 'Find x if x+1=3.', r'Find \(x\) if \(x+1=3\).',
     'Find $$x$$ if $x+1=3$.'),
    (r'Find $\frac12$.', r'Find $\dfrac{1}{2}$.', r'Find \tfrac{1}{2}.'),
    (r'Is $3 \times 4 \leq 12$?', 'Is 3×4≤12?', r'Is 3 \times 4 \le 12?'),
    (r'Is $\left(1,234\right)$ it?', 'Is (1,234) it?'),
    ('Is x² a square?', 'Is x^2 a square?', 'Is $x^{2}$ a square?'),
    ('Is x₁ it?', 'Is x_1 it?', r'Is $x_{1}$ it?'),
    ('There are 1,234,567 ants in the hill.',
     'There are 1234567 ants in the hill.',
     r'There are $1{,}234{,}567$ ants in the hill.'),
    ('What is the sum of 1,234 and 5,678?',
     'What is the sum of 1234 and 5678?'),
    ("the boys' 3  cats and the girls' dog",
     "the boys' 3 cats and the girls' dog"),
    ('The angle is 5°.', r'The angle is $5^\circ$.',
     r'The angle is $5^{\circ}$.'),
    ('Compute the sum\nof both sides.', 'Compute the sum of both sides.'),
    ('caf\u00e9 has 3 seats', 'cafe\u0301 has 3 seats'),
    ('It is .5 m.', 'It is 0.5 m.'),
    ('5 \u00b5m is what?', '5 \u03bcm is what?'),
    (r'90\% of it', '90% of it'),
])
def test_one_meaning_has_one_address(texts):
  assert len({statements.canonical(text) for text in texts}) == 1, [
      statements.canonical(text) for text in texts]
  assert len({statements.address(text) for text in texts}) == 1


# Groups of statements of which no two mean the same.
DIFFERENT = [
    ('What is 5 mm?', 'What is 5 Mm?', 'What is 5 MM?', 'What is 5 m m?',
     'What is 5 m?', 'What is -5 mm?', 'What is 50 mm?', 'What is 5.0 mm?'),
    ('f(1,234)', 'f(1234)', 'f(1,23,4)', 'f(12,34)', 'f(1.234)', 'f(1 234)'),
    ('How far is (1,234) with it?', 'How far is (1234) with it?'),
    ('What is [1,234)?', 'What is [1234)?'),
    ('What is ]1,234[?', 'What is ]1234[?'),
    ('What is {1,234}?', 'What is {1234}?', 'What is |1,234|?',
     'What is |1234|?', 'What is 1234?'),
    ('What is ("x", 1,234)?', 'What is ("x", 1234)?'),
    ('What is the sum of the numbers 1,234?',
     'What is the sum of the numbers 1234?'),
    ('What is 3,5 plus 1,234?', 'What is 3,5 plus 1234?'),
    ('Was wiegt ein Sack von 1,234 kg?', 'Was wiegt ein Sack von 1234 kg?'),
    ('How many commas are in 1,234?', 'How many commas are in 1234?'),
    ('What is 0,125 there?', 'What is 0125 there?', 'What is 125 there?'),
    ('What is 1,234,5?', 'What is 1234,5?', 'What is 12345?'),
    ('What is $1$,$234$?', 'What is 1,234?', 'What is $1,$ 234?'),
    ('add 12\u00a0345', 'add 12 345', 'add 12345'),
    ('What is 10^3?', 'What is 103?', 'What is 10_3?', 'What is 10*3?',
     'What is 10 3?'),
    ('2²', '22', '2^22', '2_2', '2 2'),
    ('2^3', '23', '2·3', '2×3', '2*3', '2_3', '2 3', '3^2'),
    ('10²³', '10²3', '102³', '10^2 3', '1023'),
    ('x_1', 'x1', 'x^1', 'x 1', 'X_1'),
    ('x_12', 'x_{1}2', 'x_1 2', 'x12'),
    ('3½', '31/2', '3 1/2', '3.5'),
    (r'2\frac{3}{4}', r'23/4', r'\frac{23}{4}', r'\frac{2}{34}'),
    ('Find a number.', 'Find $a$ number.', 'Find A number.'),
    ('It costs $5 and $6.', 'It costs 5 and 6.', 'It costs €5 and €6.',
     'It costs $5 and 6.'),
    ('from $5-$10', 'from 5-10', 'from $5-10'),
    ('5 - 3', '5 + 3', '5 \u2013 3', '-5 - 3', '5 - -3', '5 -- 3'),
    ('3\u20135', '3-5', '35'),
    ('weighs 1.50 kg', 'weighs 1.5 kg', 'weighs 15.0 kg', 'weighs 1.5 Kg'),
    ('a and B', 'A and B', 'a and b', 'a or B'),
    ('What is -5?', 'What is 5?', 'What is +5?', 'What is ~5?', 'What is ±5?'),
    ('If the year is 5′', "If the year is 5'", 'If the year is 5″'),
    ('1 2\n3 4', '1 2 3 4', '1 2 3\n4', '12\n34'),
    ('a  b\n1   2', 'a b\n1 2'),
    ('Run:\nif a:\n  b()\nc()', 'Run:\nif a:\n  b()\n  c()',
     'Run: if a: b() c()'),
    ('What is "a  b"?', 'What is "a b"?', 'What is "ab"?', 'What is a b?'),
    ('What is `a  b`?', 'What is `a b`?'),
    ('How many spaces are in a  b?', 'How many spaces are in a b?'),
    ('return\nx', 'return x'),
    ('How many lines?\nthe cat\nsat down', 'How many lines?\nthe cat sat down'),
    ('What is the last word of the first line:\nthe cat sat\non the mat',
     'What is the last word of the first line:\nthe cat sat on the mat'),
    ('What is in the longest row:\nthe cat sat\non the mat',
     'What is in the longest row:\nthe cat sat on the mat'),
    ('How many paragraphs?\nthe cat sat\non the mat',
     'How many paragraphs?\nthe cat sat on the mat'),
    ("What does len('a  b') give?", "What does len('a b') give?"),
    ('What is the length of ‘a  b’?', 'What is the length of ‘a b’?'),
    ('How long is «a  b»?', 'How long is «a b»?'),
    ('What is the sum of 100,200 and 300?',
     'What is the sum of 100200 and 300?'),
    ('Tom has 100,200, 300 there', 'Tom has 100200, 300 there'),
    ('What code point is ’?', "What code point is '?"),
    ('What is the ASCII code of the letter Ａ?',
     'What is the ASCII code of the letter A?'),
    ('How many backslashes are in \\times?', 'How many backslashes are in ×?'),
    ('5 kg', '5 g', '5 lb', '5 kg each', '5'),
    ('3:30', '3.30', '3 30', '330'),
    ('1/2', '12', '1 2', '1//2', '2/1'),
    ('a × b', 'a · b', 'a * b', 'a x b', 'ab'),
    ('a ≤ b', 'a < b', 'a ≥ b', 'a = b', 'a ≠ b'),
    ('𝐱 + y', 'x + y'),
    ('7 days', '7 Days', '7 day', 'seven days'),
    ('1，234 each', '1234 each', '1234, each'),
    ('A□ and 5', '7 and A□', 'A5 and □'),
]


@pytest.mark.parametrize('texts', DIFFERENT, ids=lambda texts: texts[0][:20])
def test_two_meanings_have_two_addresses(texts):
  for one, other in itertools.combinations(texts, 2):
    assert statements.canonical(one) != statements.canonical(other), (
        one, other, statements.canonical(one))
    assert statements.address(one) != statements.address(other)


PIECES = (
    'What is', 'the sum of', 'Ada has', 'metres', 'mm', 'Mm', ' ', '  ', '\n',
    '\n\n', '\t', '\u00a0', '\u202f', '1', '12', '345', '1,234', '0.5', '.5',
    '-', '\u2212', '\u2013', '+', '×', r'\times', '$', '$$', r'\(', r'\)',
    r'\[', r'\]', r'\$', '^', '_', '²', '³', '₁', '{', '}', '(', ')', '[',
    ']', '"', '\u201c', '\u201d', '`', "'", ',', '.', '?', '°', r'^\circ',
    r'\frac', r'\frac12', r'\left(', r'\right)', r'\,', '{,}', '%', r'\%',
    'x', 'a', 'A', '/', '=', '<', '|', '□', '…', 'é', 'e\u0301', '１', '＋',
    '\\', 'many')


def _random_text(draw):
  return ''.join(draw.choice(PIECES) + draw.choice(('', ' '))
                 for _ in range(draw.randrange(1, 12)))


def test_the_canonical_form_is_its_own_and_keeps_what_matters():
  draw = random.Random(0)
  for _ in range(20_000):
    text = _random_text(draw)
    form = statements.canonical(text)
    assert statements.canonical(form) == form, (text, form)
    # No digit, letter or operator is lost, in whatever form it is written.
    assert _skeleton(form) == _skeleton(text), (text, form)


def _skeleton(text):
  """Returns digits, letters but those of LaTeX, and signs, in their order."""
  for command, instead in (
      (r'\times', '×'), (r'^{\circ}', '°'), (r'\left', ''), (r'\right', ''),
      (r'\frac', '')):
    text = text.replace(command, instead)
  text = text.replace(r'^\circ', '°').replace(r'\c', '').replace('…', '...')
  text = unicodedata.normalize('NFC', text)
  kept = []
  for char in unicodedata.normalize('NFKC', text):
    if char in '\u2212\u2013':
      char = '-'
    if char.isalnum() or char in '+-×%|<=/':
      kept.append(char)
  # A leading zero is added to .5.
  return ''.join(kept).replace('0', '')


def test_a_change_of_one_number_sign_unit_or_word_changes_the_address():
  draw = random.Random(1)
  units = ('mm', 'cm', 'm', 'km', 'Mm', 'kg', 'g', 'mg', 'Mg', '%', '°C', '°F')
  words = ('more', 'fewer', 'times', 'each', 'together', 'left', 'first')
  for _ in range(3000):
    parts = [str(draw.randrange(-2000, 2000)), draw.choice(units),
             draw.choice(words), f'{draw.randrange(1, 10**6):,}',
             draw.choice(units)]
    other = list(parts)
    number, grouped = int(parts[0]), int(parts[3].replace(',', ''))
    at = draw.randrange(5)
    other[at] = draw.choice([
        (str(-number), f'{number}0', str(number + 1)), units, words,
        (f'{grouped + 1:,}', f'{10 * grouped:,}'), units][at])
    if other == parts:
      continue
    texts = ['The rope is {} {} and has {} than {} {}.'.format(*p)
             for p in (parts, other)]
    assert statements.address(texts[0]) != statements.address(texts[1]), texts


@pytest.mark.parametrize('text, skeleton, numbers', [
    ('What is 3 plus -4?', 'What is □ plus □?', ['3', '-4']),
    ('What is 3-4?', 'What is □-□?', ['3', '4']),
    ('What is 3 - 4?', 'What is □ - □?', ['3', '4']),
    ('What is 3 - -4?', 'What is □ - □?', ['3', '-4']),
    ('What is 3 -4?', 'What is □ -□?', ['3', '4']),
    ('Is x -4 = 0?', 'Is x -□ = □?', ['4', '0']),
    ('It is -4°C.', 'It is □°C.', ['-4']),
    ('(-4, 5)', '(□, □)', ['-4', '5']),
    ('(1,234)', '(□,□)', ['1', '234']),
    ('The 1,234 ants with 1.5 kg', 'The □ ants with □ kg', ['1234', '1.5']),
    ('x1 and x_2 and H2O and a 4x4', 'x1 and x_{2} and H2O and a □x4', ['4']),
    ('Version 1.2.3 of it', 'Version 1.2.3 of it', []),
    ('"12" and `13` and 14.', '"12" and `13` and □.', ['14']),
    ('10^3 is 1/2 of it', '□^{□} is □/□ of it', ['10', '3', '1', '2']),
    ('2² of -$5', '□^{□} of -$□', ['2', '2', '5']),
    ('a□ and 5', 'a□ and 5', []),
    ('٣ and 5', '٣ and □', ['5']),
])
def test_template(text, skeleton, numbers):
  assert statements.template(text) == (skeleton, tuple(numbers))


def test_a_template_with_its_numbers_gives_the_statement_again():
  draw = random.Random(2)
  for _ in range(5000):
    text = _random_text(draw)
    skeleton, numbers = statements.template(text)
    if not numbers:
      continue
    parts = skeleton.split(statements.SLOT)
    assert len(parts) == len(numbers) + 1
    assert ''.join(p + n for p, n in itertools.zip_longest(
        parts, numbers, fillvalue='')) == statements.canonical(text)


def test_half_a_surrogate_is_refused():
  with pytest.raises(errors.UsageError, match='valid Unicode'):
    statements.address('x\ud800')


def _integer(name, low, high, **more):
  return {'name': name, 'type': 'integer', 'min': low, 'max': high, **more}


@pytest.mark.parametrize('text, schema, values', [
    ('3 and 4', [_integer('a', 0, 9), _integer('b', 0, 9)], {'a': 3, 'b': 4}),
    ('3 and 4', [_integer('a', 0, 9), {'constant': '4'}], {'a': 3}),
    ('3 and 5', [_integer('a', 0, 9), {'constant': '4'}], None),
    ('3 and 04', [_integer('a', 0, 9), _integer('b', 0, 9)], None),
    ('3 and -0', [_integer('a', 0, 9), _integer('b', 0, 9)], None),
    ('3 and 4.0', [_integer('a', 0, 9), _integer('b', 0, 9)], None),
    ('3 and 10', [_integer('a', 0, 9), _integer('b', 0, 9)], None),
    ('3 and -4', [_integer('a', 0, 9), _integer('b', 0, 9)], None),
    ('3', [_integer('a', 0, 9), _integer('b', 0, 9)], None),
    ('3 4 5', [_integer('a', 0, 9), _integer('b', 0, 9)], None),
    ('3 and 3', [_integer('a', 0, 9)] * 2, {'a': 3}),
    ('3 and 4', [_integer('a', 0, 9)] * 2, None),
    ('15', [_integer('a', 0, 90, multiple_of=5)], {'a': 15}),
    ('16', [_integer('a', 0, 90, multiple_of=5)], None),
    ('1.50', [{'name': 'a', 'type': 'decimal', 'min': '0', 'max': '2'}],
     {'a': '1.50'}),
    ('2.01', [{'name': 'a', 'type': 'decimal', 'min': '0', 'max': '2'}], None),
    ('1/2 of 3', [{'name': 'a', 'type': 'rational', 'min': 0, 'max': '3/4'},
                  _integer('b', 0, 9)], {'a': '1/2', 'b': 3}),
    ('4/5 of 3', [{'name': 'a', 'type': 'rational', 'min': 0, 'max': '3/4'},
                  _integer('b', 0, 9)], None),
    ('1/0 of 3', [{'name': 'a', 'type': 'rational', 'min': 0, 'max': '3/4'},
                  _integer('b', 0, 9)], None),
    ('1/2', [_integer('a', 0, 9), _integer('b', 1, 9)], {'a': 1, 'b': 2}),
])
def test_parameters_are_read_in_type_and_range(text, schema, values):
  parameters.check(schema)
  assert parameters.read(statements.template(text), schema) == values


@pytest.mark.parametrize('schema, problem', [
    ([], 'a list'), ({}, 'a list'), ([3], 'an object'),
    ([{'constant': 3}], 'a string'), ([{'constant': '3'}], 'all constants'),
    ([_integer('a', 3, 2)], 'min <= max'), ([_integer('a b', 1, 2)], 'ident'),
    ([_integer('a', 1, 'x')], 'no number'), ([_integer('a', 1.5, 2)], 'no num'),
    ([_integer('a', 1, 2, multiple_of=0)], 'multiple_of'),
    ([_integer('a', 1, 2, multiple_of=5)], 'multiple of 5'),
    ([_integer('a', 1, 2) | {'type': 'float'}], 'a type of'),
    ([_integer('a', 1, 2), _integer('a', 1, 3)], 'another type or range'),
    ([{'name': 'a', 'type': 'integer', 'min': 1}], 'name, type, min and max'),
    ([_integer('a', '1/0', 2)], 'zero'),
])
def test_a_malformed_schema_is_refused(schema, problem):
  with pytest.raises(errors.UsageError, match=problem):
    parameters.check(schema)


def test_samples_fit_and_hold_the_corners():
  schema = [_integer('a', -3, 9), _integer('b', 10, 90, multiple_of=10),
            {'constant': '7'},
            {'name': 'c', 'type': 'decimal', 'min': '0.5', 'max': '9'}]
  found = parameters.sample(schema, 8)
  assert found[0] == {'a': -3, 'b': 10, 'c': '0.5'}
  assert found[1] == {'a': 9, 'b': 90, 'c': '9'}
  assert len(found) == 8 and found == parameters.sample(schema, 8)
  assert all(parameters.fits(values, schema) for values in found)
  assert not parameters.fits({'a': 1, 'b': 10}, schema)
  assert not parameters.fits({'a': True, 'b': 10, 'c': '1'}, schema)
  assert not parameters.fits({'a': '1', 'b': 10, 'c': '1'}, schema)
  assert len(parameters.sample([_integer('a', 1, 3)], 8)) == 3
