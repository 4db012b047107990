"""Measures routing in a large library: how fast, and whether it is ever wrong.

  python scripts/bench_routing.py --library=/tmp/routing
  python scripts/bench_routing.py --entries=2000 --near=400

Makes a library of templates with many numbers each, all verified by two
programs, then asks for statements that are in it, and for near-duplicates: one
number, sign, unit or word is another. Half of the templates that a changed unit
or word leads to are in the library as well, half are not. What is true of each
near-duplicate says a function that shares nothing with the programs. A wrong
hit is an answer given that is not the true answer of that very statement. For
comparison, BM25's nearest entry answers the same statements.

A table for people goes first; the last line on stdout is one JSON object.
Exits 1 if the library gives a wrong answer or misses a statement that it has.
"""

import argparse
from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import fractions
import json
import math
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from kvgraft_jax import checkers
from kvgraft_jax import library as library_lib
from kvgraft_jax import routing

Numbers = dict[str, int]
Truth = Callable[..., int | fractions.Fraction]

READ = 'import json, sys\np = json.load(sys.stdin)\n'
F = 'from fractions import Fraction\n'


@dataclasses.dataclass(frozen=True)
class Kind:
  """One sentence with one meaning.

  Attributes:
    text: with {names} of numbers and [words].
    ranges: of the numbers, in the order of the text.
    programs: two bodies that print from `p`.
    truth: of the numbers by name.
    twin: name of what differs from the other kinds of the family.
    signed: numbers of which a sign can be changed.
    rule: by which answers are compared.
  """

  text: str
  ranges: dict[str, tuple[int, int]]
  programs: tuple[str, str]
  truth: Truth
  twin: str = 'word'
  signed: tuple[str, ...] = ()
  rule: str = 'integer'


def _steps(first: str, count: str, change: str) -> str:
  """Returns a program that goes step by step."""
  return (f'n = {first}\nfor _ in range({count}):\n  n += {change}\nprint(n)\n')


def families() -> list[list[Kind]]:
  """Returns kinds that differ by a word, a unit or an operator."""
  small, large = (2, 99), (100, 999)
  found = []
  for text in (
      'A shop keeps {a} [items] in one room and {b} in another.'
      ' How many [items] does it keep?',
      '[name] counts {a} [items] on one day and {b} on the next.'
      ' How many [items] were counted?'):
    found.append([Kind(
        text, {'a': large, 'b': small},
        ("print(p['a'] + p['b'])", _steps("p['a']", "p['b']", '1')),
        lambda a, b: a + b)])
  found.append([
      Kind(f'[name] has {{a}} [items] and a friend has {{b}} {word}. How many'
           ' [items] does the friend have?', {'a': large, 'b': small},
           (f"print(p['a'] {op} p['b'])",
            _steps("p['a']", "p['b']", f'{op}1')), truth)
      for word, op, truth in (('more', '+', lambda a, b: a + b),
                              ('fewer', '-', lambda a, b: a - b))])
  found.append([
      Kind(f'The temperature in [place] was {{a}} °C and {word} by {{b}}'
           ' degrees. How many °C is it now?', {'a': (-60, 60), 'b': small},
           (f"print(p['a'] {op} p['b'])",
            _steps("p['a']", "p['b']", f'{op}1')), truth, signed=('a',))
      for word, op, truth in (('rose', '+', lambda a, b: sum((a, b))),
                              ('fell', '-', lambda a, b: sum((a, -b))))])
  units = (('hours', 'minutes', 60), ('minutes', 'seconds', 60),
           ('feet', 'inches', 12), ('days', 'hours', 24),
           ('weeks', 'days', 7), ('metres', 'centimetres', 100),
           ('kilograms', 'grams', 1000), ('kg', 'g', 1000),
           ('m', 'mm', 1000), ('Mm', 'm', 10 ** 6), ('km', 'm', 1000))
  found.append([
      Kind(f'How many {low} are {{a}} {high} and {{b}} {low}?',
           {'a': large, 'b': small},
           (f"print(p['a'] * {ratio} + p['b'])",
            _steps("p['b']", "p['a']", str(ratio))),
           lambda a, b, ratio=ratio: b + ratio * a, 'unit')
      for high, low, ratio in units])
  for one, other, ratio in (('m', 'cm', 100), ('cm', 'mm', 10),
                            ('feet', 'inches', 12), ('km', 'm', 1000)):
    text = 'A [thing] is {a} %s long and {b} %s wide. What is its %s in %s?'
    kinds = []
    for long, wide, what, into, formula, truth in (
        (one, one, 'perimeter', one, '2 * (a + b)', lambda a, b: a + a + b + b),
        (one, one, 'area', f'square {one}', 'a * b', lambda a, b: b * a),
        (one, one, 'perimeter', other, f'2 * (a + b) * {ratio}',
         lambda a, b, r=ratio: 2 * a * r + 2 * b * r),
        (one, other, 'perimeter', other, f'2 * (a * {ratio} + b)',
         lambda a, b, r=ratio: 2 * a * r + 2 * b),
        (one, one, 'longer side', one, 'a if a > b else b',
         lambda a, b: max(a, b))):
      slow = {
          '2 * (a + b)': 'print(sum([a, b, a, b]))',
          'a * b': 'n = 0\nfor _ in range(a):\n  n += b\nprint(n)',
          'a if a > b else b': 'print(sorted([a, b])[-1])'}.get(
              formula, f'n = 0\nfor side in [a, b] * 2:\n  n += side\n'
              f'print(n * {ratio})' if long == wide else
              f'n = 0\nfor side in [a * {ratio}, b] * 2:\n  n += side\n'
              'print(n)')
      names = "a, b = p['a'], p['b']\n"
      kinds.append(Kind(
          text % (long, wide, what, into), {'a': small, 'b': (2, 98)},
          (f'{names}print({formula})', names + slow), truth, 'unit'))
    found.append(kinds)
  found.append([
      Kind(f'A sequence of [items] starts with {{a}} and {word} by {{b}} at'
           ' each step. What is its term number {c}?',
           {'a': (-99, 99), 'b': (2, 40), 'c': (3, 60)},
           (f"print(p['a'] {op} p['b'] * (p['c'] - 1))",
            _steps("p['a']", "p['c'] - 1", f"{op}p['b']")), truth,
           signed=('a',))
      for word, op, truth in (
          ('grows', '+', lambda a, b, c: a - b + b * c),
          ('shrinks', '-', lambda a, b, c: a + b - b * c))])
  found.append([
      Kind(f'What is the {word} of {{a}}^{{b}} divided by {{c}}?',
           {'a': (2, 60), 'b': (2, 9), 'c': (3, 40)},
           (f"print(p['a'] ** p['b'] {op} p['c'])",
            f"n = 1\nfor _ in range(p['b']):\n  n = n * p['a']\n"
            f"print(divmod(n, p['c'])[{place}])"), truth)
      for word, op, place, truth in (
          ('remainder', '%', 1, lambda a, b, c: pow(a, b, c)),
          ('whole quotient', '//', 0, lambda a, b, c: math.floor(
              fractions.Fraction(a ** b, c))))])
  found.append([
      Kind(f'Solve {{a}}x {op} {{b}} = {{c}} for x.',
           {'a': (2, 40), 'b': (1, 60), 'c': (-60, 60)},
           (f"{F}print(Fraction(p['c'] - {op}p['b'], p['a']))",
            f"{F}x = Fraction(0)\nx += p['c']\nx {back}= p['b']\n"
            "print(x / p['a'])"), truth, signed=('c', 'a', 'b'),
           rule='rational')
      for op, back, truth in (
          ('+', '-', lambda a, b, c: -fractions.Fraction(b - c, a)),
          ('-', '+', lambda a, b, c: fractions.Fraction(b + c, a)))])
  found.append([
      Kind(f'What is {{a}} {first} {{b}} {second} {{c}}?',
           {'a': (-40, 40), 'b': (-40, 40), 'c': (-40, 40)},
           (f"print(p['a'] {x} p['b'] {y} p['c'])", slow), truth,
           signed=('a', 'b', 'c'))
      for first, x, second, y, slow, truth in (
          ('times', '*', 'plus', '+',
           "n = p['c']\nfor _ in range(abs(p['b'])):\n"
           "  n += p['a'] if p['b'] > 0 else -p['a']\nprint(n)",
           lambda a, b, c: c + b * a),
          ('times', '*', 'minus', '-',
           "n = -p['c']\nfor _ in range(abs(p['b'])):\n"
           "  n += p['a'] if p['b'] > 0 else -p['a']\nprint(n)",
           lambda a, b, c: b * a - c),
          ('plus', '+', 'minus', '-', "print(sum([p['a'], p['b'], -p['c']]))",
           lambda a, b, c: a - (c - b)),
          ('minus', '-', 'minus', '-', "print(sum([p['a'], -p['b'], -p['c']]))",
           lambda a, b, c: a - (b + c)))])
  found.append([
      Kind(f'[name] pays {{a}} {unit} for each of {{b}} [items]. How many'
           f' {into} is that?', {'a': small, 'b': small},
           (f"print(p['a'] * p['b'] * {ratio})",
            _steps('0', "p['b']", f"p['a'] * {ratio}")),
           lambda a, b, ratio=ratio: ratio * b * a, 'unit')
      for unit, into, ratio in (('dollars', 'dollars', 1),
                                ('dollars', 'cents', 100),
                                ('cents', 'cents', 1), ('euros', 'euros', 1))])
  found.append([
      Kind(f'A [vehicle] goes {{a}} {speed} for {{b}} {unit}. How many km does'
           ' it go?', {'a': small, 'b': (2, 98)},
           (f"{F}print(Fraction(p['a'] * p['b'] * {top}, {bottom}))",
            f"{F}n = Fraction(0)\nfor _ in range(p['b']):\n"
            f"  n += Fraction({top}, {bottom}) * p['a']\nprint(n)"),
           lambda a, b, t=top, u=bottom: fractions.Fraction(a * t, u) * b,
           'unit', rule='rational')
      for speed, unit, top, bottom in (
          ('km/h', 'hours', 1, 1), ('km/h', 'minutes', 1, 60),
          ('m/s', 'hours', 18, 5), ('m/s', 'minutes', 3, 50),
          ('km/h', 'seconds', 1, 3600))])
  found.append([
      Kind(f'What is the {word} of {{a}} and {{b}}?', {'a': large, 'b': small},
           (fast, slow), truth)
      for word, fast, slow, truth in (
          ('greatest common divisor', "import math\nprint(math.gcd(p['a'],"
           " p['b']))", "a, b = p['a'], p['b']\nwhile b:\n  a, b = b, a % b\n"
           'print(a)', lambda a, b: max(
               d for d in range(1, b + 1) if not a % d and not b % d)),
          ('least common multiple', "import math\nprint(math.lcm(p['a'],"
           " p['b']))", "n = p['a']\nwhile n % p['b']:\n  n += p['a']\n"
           'print(n)', lambda a, b: next(
               a * k for k in range(1, b + 1) if not a * k % b)),
          ('positive difference', "print(p['a'] - p['b'])",
           "print(len(range(p['b'], p['a'])))", lambda a, b: abs(b - a)))])
  found.append([
      Kind(f'What is the {word} of {{a}}, {{b}} and {{c}}?',
           {'a': (-99, 99), 'b': (-99, 99), 'c': (-99, 99)}, (fast, slow),
           truth, signed=('a', 'b', 'c'))
      for word, fast, slow, truth in (
          ('largest', "print(max(p['a'], p['b'], p['c']))",
           "print(sorted([p['a'], p['b'], p['c']])[2])",
           lambda a, b, c: -min(-a, -b, -c)),
          ('smallest', "print(min(p['a'], p['b'], p['c']))",
           "print(sorted([p['a'], p['b'], p['c']])[0])",
           lambda a, b, c: -max(-a, -b, -c)),
          ('middle one', "print(sorted([p['a'], p['b'], p['c']])[1])",
           "n = [p['a'], p['b'], p['c']]\nn.remove(max(n))\nprint(max(n))",
           lambda a, b, c: statistics.median((a, b, c))))])
  return found


WORDS = {
    'items': 'apples books stones coins stamps marbles pencils shells'.split(),
    'name': 'Ada Ben Cleo Dan'.split(),
    'place': 'Bern Oslo Riga Turin Ghent Porto Graz Lund'.split(),
    'thing': 'carpet field board yard roof panel'.split(),
    'vehicle': 'car train boat bus tram truck'.split(),
}


@dataclasses.dataclass(frozen=True)
class Form:
  """A kind with its words: one template.

  Attributes:
    family: number of its family.
    kind: what it asks.
    words: word of each placeholder.
    known: whether the library shall have it.
  """

  family: int
  kind: Kind
  words: tuple[tuple[str, str], ...]
  known: bool

  def statement(self, numbers: Numbers) -> str:
    """Returns the statement for some numbers."""
    text = self.kind.text
    for name, word in self.words:
      text = text.replace(f'[{name}]', word)
    for name, value in numbers.items():
      text = text.replace(f'{{{name}}}', str(value))
    return text

  def candidate(self, numbers: Numbers) -> library_lib.Candidate:
    """Returns what is verified; its answer comes from the true function."""
    schema = [{'name': name, 'type': 'integer', 'min': low, 'max': high}
              for name, (low, high) in self.kind.ranges.items()]
    answer = self.kind.truth(**numbers)
    return library_lib.Candidate(
        self.statement(numbers), f'{self.kind.text}\nThe answer is {answer}.',
        str(answer), self.kind.rule, 'programs', f'family{self.family}', schema,
        tuple(READ + body for body in self.kind.programs))


def make_forms(draw: random.Random) -> list[Form]:
  """Returns all templates; half of each family's kinds stay unknown."""
  forms = []
  for number, kinds in enumerate(families()):
    for kind in kinds:
      combinations: list[tuple[tuple[str, str], ...]] = [()]
      for name, words in WORDS.items():
        if f'[{name}]' in kind.text:
          combinations = [(*c, (name, w)) for c in combinations for w in words]
      forms += [Form(number, kind, words,
                     len(kinds) == 1 or draw.random() < 0.5)
                for words in combinations]
  return forms


def make_entries(
    forms: list[Form], count: int, draw: random.Random
) -> list[tuple[Form, Numbers]]:
  """Returns `count` different statements, spread over the known templates."""
  known = [form for form in forms if form.known]
  found: dict[str, tuple[Form, Numbers]] = {}
  while len(found) < count:
    form = known[len(found) % len(known)]
    numbers = {name: draw.randint(*r) for name, r in form.kind.ranges.items()}
    found.setdefault(form.statement(numbers), (form, numbers))
  # Programs that are shared are verified together.
  return sorted(found.values(), key=lambda one: one[0].kind.programs)


def make_near(
    forms: list[Form], entries: list[tuple[Form, Numbers]], count: int,
    draw: random.Random,
) -> Iterator[tuple[str, Form, Numbers]]:
  """Yields what was changed, and the template and numbers behind it."""
  twins: dict[Any, list[Form]] = {}
  for form in forms:
    twins.setdefault((form.family, form.words), []).append(form)
  what = ''
  while count:
    what = what or draw.choice(('number', 'sign', 'twin'))
    form, numbers = draw.choice(entries)
    if what == 'twin':
      others = [f for f in twins[form.family, form.words] if f is not form]
      if not others:
        continue
      form = draw.choice(others)
      what = form.kind.twin  # A word or a unit.
    elif what == 'sign':
      names = [n for n in form.kind.signed if numbers[n]]
      if not names:
        continue
      name = draw.choice(names)
      numbers = numbers | {name: -numbers[name]}
    else:
      name = draw.choice(list(numbers))
      other = numbers[name] + draw.choice((-1, 1, 10, 100, 900, 9000))
      if other < 1 or form.kind.twin == 'word' and name == 'b' and other > 99:
        continue  # Where a formula of positive numbers might not hold.
      numbers = numbers | {name: other}
    yield what, form, numbers
    count, what = count - 1, ''


def right(form: Form, numbers: Numbers, answer: str) -> bool:
  """Tells whether an answer is the true one."""
  return checkers.same(
      form.kind.rule, answer, str(form.kind.truth(**numbers)))


def measure(
    library: library_lib.Library, entries: list[tuple[Form, Numbers]],
    near: list[tuple[str, Form, Numbers]], draw: random.Random, bm25: bool,
) -> dict[str, Any]:
  """Returns the figures of routing in a library that holds `entries`."""
  router = routing.Router(library)
  asked = draw.sample(entries, min(len(entries), max(len(near), 100)))
  times, missed, wrong = [], 0, 0
  for form, numbers in asked:
    text = form.statement(numbers).replace(' ', '  ', 1)  # Written otherwise.
    began = time.perf_counter()
    entry = router.exact(text)
    times.append(time.perf_counter() - began)
    missed += entry is None
    wrong += entry is not None and not right(form, numbers, entry.answer)
  result: dict[str, Any] = {
      'asked': len(asked), 'exact_missed': missed, 'exact_wrong': wrong,
      'exact_median_us': round(1e6 * statistics.median(times)),
      'exact_worst_us': round(1e6 * max(times))}

  times, matches, at = [], [], []
  kinds: dict[str, int] = {}
  hits = {'exact': 0, 'parameters': 0}
  given: list[str | None] = [None] * len(near)
  for n, (what, form, numbers) in enumerate(near):
    kinds[what] = kinds.get(what, 0) + 1
    text = form.statement(numbers)
    entry = router.exact(text)
    if entry is not None:
      given[n] = entry.answer
      hits['exact'] += 1
      continue
    began = time.perf_counter()
    match = router.parameters(text)
    times.append(time.perf_counter() - began)
    if match is not None:
      matches.append(match)
      at.append(n)
  for n, answer in zip(at, router.answers(matches)):
    given[n] = answer
    hits['parameters'] += answer is not None
  wrong = [n for n, answer in enumerate(given)
           if answer is not None and not right(*near[n][1:], answer)]
  for n in wrong[:10]:
    print(f'WRONG: {near[n][1].statement(near[n][2])} -> {given[n]}')
  result |= {
      'near': len(near), 'near_by_change': kinds, 'near_hits': hits,
      'near_wrong': len(wrong),
      'near_unanswered': sum(answer is None for answer in given),
      'parameters_median_us': round(1e6 * statistics.median(times or [0])),
      'parameters_worst_us': round(1e6 * max(times or [0]))}
  if bm25:
    began = time.perf_counter()
    router.similar('a')  # Builds the index.
    result['bm25_index_s'] = round(time.perf_counter() - began, 1)
    times, wrong_hits, answered = [], 0, 0
    for _, form, numbers in near:
      began = time.perf_counter()
      found = router.similar(form.statement(numbers))
      times.append(time.perf_counter() - began)
      if found:
        answered += 1
        wrong_hits += not right(form, numbers, found[0][0].answer)
    result |= {
        'bm25_answered': answered, 'bm25_wrong': wrong_hits,
        'bm25_wrong_rate': round(wrong_hits / max(answered, 1), 4),
        'bm25_median_us': round(1e6 * statistics.median(times or [0]))}
  return result


def run(args: argparse.Namespace) -> dict[str, Any]:
  """Builds the library and measures; returns the figures."""
  draw = random.Random(args.seed)
  forms = [form for form in make_forms(draw)
           if args.kinds is None or form.family % args.kinds == 0]
  entries = make_entries(forms, args.entries, draw)
  near = list(make_near(forms, entries, args.near, draw))
  with library_lib.Library(args.library, create=True) as library:
    began = time.perf_counter()
    count, refused = library.add_all(
        (form.candidate(numbers) for form, numbers in entries),
        unsafe=args.unsafe_exec)
    seconds = time.perf_counter() - began
    for candidate, why in refused[:5]:
      print(f'refused: {candidate.problem}: {why}')
    stats = library.stats()
    return {
        'entries': count, 'refused': len(refused),
        'templates': stats['templates'], 'families': len(stats['families']),
        'programs': stats['kinds']['source'], 'build_s': round(seconds, 1),
        'bytes': (library.path / library_lib.FILE).stat().st_size,
        **measure(library, entries, near, draw, args.bm25)}


def main() -> int:
  """Runs the benchmark; returns the exit code."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('--entries', type=int, default=100_000)
  parser.add_argument('--near', type=int, default=10_000)
  parser.add_argument('--library', help='new directory; temporary by default')
  parser.add_argument('--kinds', type=int, help='take every n-th family only')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--bm25', action=argparse.BooleanOptionalAction,
                      default=True)
  parser.add_argument('--unsafe_exec', action='store_true',
                      help='run programs although nothing keeps them apart')
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as temporary:
    args.library = args.library or temporary
    result = run(args)
  for name, value in result.items():
    print(f'{name:22} {value}')
  print(json.dumps(result))
  return int(bool(result['near_wrong'] or result['exact_wrong']
                  or result['exact_missed'] or result['refused']))


if __name__ == '__main__':
  sys.exit(main())
