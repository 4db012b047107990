"""The final answer in free text."""

import pytest

from kvgraft_jax import answers


@pytest.mark.parametrize('text, rule, answer', [
    # Places, the strongest first, the last of each.
    (r'first \boxed{1}, then \boxed{2}. The answer is 3.', 'integer', '2'),
    ('Answer: 1\nFinal answer: 2\nand 3', 'integer', '2'),
    ('The answer is 1. No, the answer is 2, not 3.', 'integer', '2'),
    ('**Final Answer:** 42 apples.', 'integer', '42'),
    ('## Final Answer\n\n42', 'integer', '42'),
    ('so it is 7.\n#### 1,234', 'integer', '1234'),
    ('ANSWER = 5', 'integer', '5'),
    ('the answer is: $5$.', 'integer', '5'),
    ('we get 3, then 4', 'integer', '4'),
    ('final answer: unknown\nAnswer: 4', 'integer', '4'),
    ('nothing here', 'integer', None),
    ('', 'integer', None),
    # Boxes.
    (r'\boxed{\frac{3}{4}}', 'rational', '3/4'),
    (r'\fbox{5}', 'integer', '5'),
    (r'$$\boxed{\text{area} = 12\text{ cm}^2}$$', 'integer', '12'),
    (r'\boxed{2^{10}}', 'integer', None),
    (r'\boxed{12 \text{ cm}}', 'integer', '12'),
    (r'\boxed{{5}}', 'integer', '5'),
    (r'\boxed{1{,}234}', 'integer', '1234'),
    (r'\boxed{1\,234}', 'integer', '1234'),
    (r'\boxed{x = 12}', 'integer', '12'),
    (r'\boxed{90^\circ}', 'integer', '90'),
    (r'\boxed{12\%}', 'integer', '12'),
    (r'\boxed{\$12}', 'integer', '12'),
    (r'4 of \boxed{3, 5}', 'integer', None),
    (r'\boxed{6} and \boxed{7', 'integer', '6'),
    (r'\boxed{\text{(C)}}', 'choice', 'C'),
    (r'\boxed{\sqrt{2}}', 'symbolic', r'\sqrt{2}'),
    # Numbers.
    ('answer: -5', 'integer', '-5'),
    ('answer: \u22125', 'integer', '-5'),
    ('answer: +5', 'integer', '5'),
    ('it costs -$5', 'integer', '-5'),
    ('from 5-3', 'integer', '3'),
    ('answer: x = 2 + 3 = 5', 'integer', '5'),
    ('12.00', 'integer', '12'),
    ('12.', 'integer', '12'),
    ('answer: 12.50', 'decimal', '12.50'),
    ('answer: .5', 'decimal', '0.5'),
    ('answer: 2e-3', 'decimal', '2e-3'),
    ('1,234,567.5', 'decimal', '1234567.5'),
    ('the list 1,2', 'integer', '2'),
    ('answer: 3/4', 'integer', '3/4'),
    ('answer: 6 / 4', 'rational', '3/2'),
    ('answer: 1 1/2', 'rational', '3/2'),
    ('answer: -1 1/2', 'rational', '-3/2'),
    ('answer: 1/0', 'rational', '1/0'),
    (r'\dfrac12', 'rational', '1/2'),
    # Units and words stay out.
    ('answer is 5 m/s', 'integer', '5'),
    ('answer: 5km', 'integer', '5'),
    ('it is 5 cm^2', 'integer', '5'),
    ('3 atoms in H2O', 'integer', '3'),
    ('6 on the 2nd day', 'integer', '6'),
    ('answer: 10 e', 'decimal', '10'),
    # Letters.
    ('the answer is (b).', 'choice', 'B'),
    ('Answer: c', 'choice', 'C'),
    ('Answer: **D**', 'choice', 'D'),
    ('The answer is A because of it.', 'choice', 'A'),
    ('A dog and a cat: so B', 'choice', 'B'),
    ('(A) is wrong, (C) is right', 'choice', 'C'),
    ("I don't know", 'choice', None),
    # Text.
    ('Answer: Paris.', 'equal', 'Paris'),
    ('one\ntwo `x + 1`.', 'equal', 'two `x + 1`'),
    ('final answer: $x + 1$', 'symbolic', 'x + 1'),
    ('Answer: "yes"', 'regex', 'yes'),
])
def test_extract(text, rule, answer):
  assert answers.extract(text, rule) == answer


def test_long_texts_take_no_long_time():
  for piece in ('\\boxed{', 'answer is ', '1,', '{', '1 1', '$', '(a', '####',
                '9'):
    answers.extract(piece * 5000, 'integer')
    answers.extract(piece * 5000, 'choice')
