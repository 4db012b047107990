"""Questions are prefixes of one another, and replies end where they should."""

import pytest

from kvgraft_jax import errors
from kvgraft_jax import prompts
import model_helpers

_P, _Q = 'What is 3 plus 4?', 'What is 5 plus 2?'


def _make(style='plain'):
  return prompts.Prompts(model_helpers.tiny(), style)


def _text(ids):
  return model_helpers.tiny().tokenizer.decode(ids)


def test_a_plain_question_behind_a_worked_problem():
  made = _make()
  worked = made.written(_P, 'Count on.\n3 + 4 = 7', '7')
  front = made.front(worked)
  assert front[:len(made.preamble())] == made.preamble()
  assert front[0] == model_helpers.tiny().tokenizer.bos_id
  assert _text(front).endswith(
      f'Problem: {_P}\nSolution: Count on.\n3 + 4 = 7\nAnswer: 7')
  assert _text(made.ask(_Q, 'answer', front, worked)) == (
      f'\n\nProblem: {_Q}\nAnswer:')
  assert _text(made.ask(_P, 'recall', front, worked)) == (
      f'\n\nProblem: {_P}\nSolution: as above.\nAnswer:')
  assert _text(made.ask(_Q, 'solution')) == f'Problem: {_Q}\nSolution:'
  assert _text(made.answer('7')) == ' 7'


def test_a_chat_question_goes_on_with_the_conversation():
  made, model = _make('chat'), model_helpers.tiny()
  worked = made.written(_P, 'Count on.', '7')
  assert worked.reply == 'Count on.\nFinal answer: 7'
  front = made.front(worked)
  ask = made.ask(_Q, 'answer', front, worked)
  say = prompts._INSTRUCTIONS
  turns = [{'role': 'user', 'content': f'{_P}\n\n{say["solution"]}'},
           {'role': 'assistant', 'content': worked.reply},
           {'role': 'user', 'content': f'{_Q}\n\n{say["answer"]}'}]
  assert front + ask == model.chat_tokens(turns)
  assert made.preamble() == [] and made.ask(_P, 'solution')[:1] == front[:1]
  with pytest.raises(errors.UsageError, match='cannot stand in front'):
    made.ask(_Q, 'answer', [*front[:-1], 5], worked)


@pytest.mark.parametrize('mode, text, ended', [
    ('solution', '3 + 4 = 7', False),
    ('solution', '3 + 4 = 7\nAnswer:', False),
    ('solution', '3 + 4 = 7\nAnswer: 7', False),
    ('solution', '3 + 4 = 7\nAnswer: 7\n', True),
    ('solution', 'no\nProblem:', True),
    ('think', 'x\nAnswer: 7\n', True),
    ('program', 'print(7)\n', False), ('program', 'print(7)\n```', True)])
def test_a_plain_reply_ends(mode, text, ended):
  _, stop_when = _make().stops(mode)
  ids = model_helpers.tiny().tokenizer.encode(text, add_bos=False)
  assert stop_when(ids) is ended


def test_an_answer_ends_with_its_line():
  stop_ids, stop_when = _make().stops('answer')
  line_feed, = model_helpers.tiny().tokenizer.encode('\n', add_bos=False)
  assert line_feed in stop_ids and stop_when is None
  assert _make('chat').stops('answer') == (None, None)


@pytest.mark.parametrize('style, mode, text, answer', [
    ('plain', 'answer', ' 7', '7'), ('plain', 'answer', ' 7 cm', '7'),
    ('plain', 'answer', ' none', None),
    ('plain', 'solution', ' 3 + 4 = 7\nAnswer: 7\n\nProblem: 9?', '7'),
    ('chat', 'solution', '3 + 4 = 7\nFinal answer: 7', '7'),
    ('chat', 'answer', 'Final answer: 7', '7')])
def test_the_answer_is_read_out_of_a_reply(style, mode, text, answer):
  assert _make(style).read(mode, text, 'integer') == answer


@pytest.mark.parametrize('style, text', [
    ('plain', 'print(7)\n```\nIt prints 7.'),
    ('chat', 'Here:\n```python\nprint(7)\n```\nIt prints 7.'),
    ('chat', 'print(7)')])
def test_the_program_is_read_out_of_a_reply(style, text):
  assert _make(style).program(text) == 'print(7)\n'


def test_a_reply_that_ran_on_is_no_worked_problem():
  made = _make()
  assert made.generated(_P, 'solution', ' 7\n\nProblem: next') is None
  assert made.generated(_P, 'solution', ' ') is None
  assert made.generated(_P, 'solution', ' 3 + 4\nAnswer: 7').reply == (
      'Solution: 3 + 4\nAnswer: 7')


def test_what_is_unknown_is_refused():
  with pytest.raises(errors.UsageError, match='plain, chat'):
    _make('verse')
