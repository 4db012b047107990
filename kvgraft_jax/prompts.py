"""What a model is asked, and where its answer ends, in two styles.

`plain` is for base models: labelled paragraphs that a text goes on with.

    Problem: P
    Solution: S
    Answer: A

    Problem: P2
    Answer:

`chat` is for tuned ones: the same as turns of a conversation. Either way what
stands in front of a question is a prefix of tokens, so that an artifact of a
worked problem can be grafted and asked behind.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

from kvgraft_jax import answers
from kvgraft_jax import engine
from kvgraft_jax import errors

STYLES = ('plain', 'chat')
# What a reply is to be: the answer alone, the answer of a solution that stands
# in front, a short solution, a program, or a solution after longer thinking.
MODES = ('answer', 'recall', 'solution', 'program', 'think')

_PREAMBLE = 'Short problems, each with its solution and its answer.\n\n'
_FENCE = '```'
_OPENERS = {
    'answer': 'Answer:',
    'recall': 'Solution: as above.\nAnswer:',
    'solution': 'Solution:',
    'program': f'A Python program that prints the answer:\n{_FENCE}python\n',
    'think': "Solution: Let's think step by step.",
}
_INSTRUCTIONS = {
    'answer': 'Reply with "Final answer:" and the answer, nothing else.',
    'recall': 'Reply with "Final answer:" and the answer from above, nothing'
              ' else.',
    'solution': 'Solve it in a few lines. End with a line "Final answer:" and'
                ' the answer.',
    'program': 'Write a Python program that computes the answer and prints it,'
               ' and nothing else. Reply with one code block.',
    'think': 'Think it through carefully, and check the result. End with a line'
             ' "Final answer:" and the answer.',
}
_LINE_FEEDS = 8  # Runs of so many are one token at most.


@dataclasses.dataclass(frozen=True)
class Worked:
  """A problem with its reply, as it stands in front of a question.

  Attributes:
    problem: the statement.
    reply: the whole reply, in the style's form.
    mode: how it was asked for.
  """

  problem: str
  reply: str
  mode: str = 'solution'


class Prompts:
  """Token ids of questions to one model.

  Args:
    model: has a tokenizer.
    style: of `STYLES`.

  Raises:
    UsageError: if the model has no tokenizer, or the style is unknown.
  """

  def __init__(self, model: engine.Model, style: str = 'plain'):
    if style not in STYLES:
      raise errors.UsageError(
          f'style: expected one of {", ".join(STYLES)}, found {style!r:.40}')
    if model.tokenizer is None:
      raise errors.UsageError(
          f'model {model.source!r} has no tokenizer; choose one that has')
    self._model, self.style = model, style
    encode = model.tokenizer.encode
    runs = [encode('\n' * n, add_bos=False)
            for n in range(1, _LINE_FEEDS + 1)]
    # Ids that are one or more line feeds, and those that are several.
    self._feeds = {ids[0] for ids in runs if len(ids) == 1}
    self._blanks = {ids[0] for ids in runs[1:] if len(ids) == 1}

  def preamble(self) -> list[int]:
    """Returns the ids that stand in front of everything; [] for chat."""
    if self.style == 'chat':
      return []
    return self._model.tokenizer.encode(_PREAMBLE, add_bos=True)

  def written(self, problem: str, solution: str, answer: str) -> Worked:
    """Returns a problem with a reply made of its parts."""
    label = 'Answer' if self.style == 'plain' else 'Final answer'
    solution = solution.strip()
    if self.style == 'plain' and solution:
      solution = f'Solution: {solution}'
    return Worked(problem, f'{solution}\n{label}: {answer}'.strip())

  def front(self, worked: Worked) -> list[int]:
    """Returns all ids of a worked problem, from position 0."""
    if self.style == 'chat':
      return self._model.chat_tokens(
          self._turns(worked), add_generation_prompt=False)
    return self.preamble() + self._encode(
        f'Problem: {worked.problem}\n{worked.reply}')

  def ask(
      self, problem: str, mode: str, front: Sequence[int] | None = None,
      worked: Worked | None = None,
  ) -> list[int]:
    """Returns the ids of a question, to stand behind what is there.

    Args:
      problem: the statement.
      mode: of `MODES`.
      front: ids that stand in front; None for the preamble alone.
      worked: what `front` holds, needed by chat.

    Raises:
      UsageError: if the conversation's ids do not begin with `front`.
    """
    if self.style == 'plain':
      gap = '' if front is None else '\n\n'
      return self._encode(f'{gap}Problem: {problem}\n{_OPENERS[mode]}')
    turns = self._turns(worked) if worked else []
    turns.append(self._question(problem, mode))
    ids = self._chat(turns, mode)
    front = list(front or ())
    if ids[:len(front)] != front:
      raise errors.UsageError(
          'the chat template writes a worked problem otherwise when a question'
          " follows, so that it cannot stand in front; use style='plain'")
    return ids[len(front):]

  def repair(self, found: str) -> list[int]:
    """Returns ids behind a program that failed; the next one is to follow."""
    found = found.strip()[-200:] or 'it printed nothing'
    return self._encode(
        f'\n{_FENCE}\nRunning it: {found}\nThe corrected program:\n'
        f'{_FENCE}python\n')

  def stops(
      self, mode: str
  ) -> tuple[set[int] | None, Callable[[list[int]], bool] | None]:
    """Returns ids that end a reply, and what tells that it has ended."""
    if self.style == 'chat':
      return None, None
    eos = set(self._model.tokenizer.eos_ids)
    if mode in ('answer', 'recall'):
      return eos | self._feeds, None
    decode = self._model.tokenizer.decode

    def ended(ids: list[int]) -> bool:
      text = decode(ids)
      if mode == 'program':
        return _FENCE in text
      _, label, rest = text.partition('Answer:')
      return 'Problem:' in text or bool(label and '\n' in rest.lstrip())

    return (eos | self._blanks if mode == 'solution' else eos), ended

  def read(self, mode: str, text: str, rule: str) -> str | None:
    """Returns the answer in a reply, None if there is none."""
    text = text.partition('Problem:')[0]
    if mode in ('answer', 'recall') and self.style == 'plain':
      text = f'Answer: {text.strip()}'
    return answers.extract(text, rule)

  def text(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, control tokens included."""
    return self._model.tokenizer.decode(ids, show_special=True)

  def answer(self, answer: str) -> list[int]:
    """Returns the ids of an answer behind a question of mode `answer`."""
    return self._encode(
        f' {answer}' if self.style == 'plain' else f'Final answer: {answer}')

  def generated(
      self, problem: str, mode: str, text: str
  ) -> Worked | None:
    """Returns what a context holds behind a reply, None if it cannot stand.

    A reply that ran on into another problem is no worked problem.
    """
    if self.style == 'chat':
      return Worked(problem, text, mode)
    if 'Problem:' in text or not text.strip():
      return None
    return Worked(problem, f'{_OPENERS[mode]}{text}', mode)

  def program(self, text: str) -> str:
    """Returns the source in a reply to the mode `program`."""
    if self.style == 'chat':
      _, fence, rest = text.partition(_FENCE)
      text = rest.partition('\n')[2] if fence else text
    return text.partition(_FENCE)[0].strip('\n') + '\n'

  def _encode(self, text: str) -> list[int]:
    return self._model.tokenizer.encode(text, add_bos=False)

  def _chat(self, turns: list[dict[str, str]], mode: str) -> list[int]:
    if mode == 'think':
      try:
        return self._model.chat_tokens(turns, thinking=True)
      except errors.UsageError:
        pass  # The template knows none: the instruction alone has to do.
    return self._model.chat_tokens(turns)

  def _question(self, problem: str, mode: str) -> dict[str, str]:
    return {'role': 'user', 'content': f'{problem}\n\n{_INSTRUCTIONS[mode]}'}

  def _turns(self, worked: Worked) -> list[dict[str, str]]:
    return [self._question(worked.problem, worked.mode),
            {'role': 'assistant', 'content': worked.reply}]
