"""What a flywheel run found, in sentences, from the figures of its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

# Raised with every change of a sentence.
VERSION = 1
_PUBLISHED = (
    'For comparison: a closed system publishes (arXiv:2607.14431, not checked'
    ' here) that Gemma 4 12B, tuned, answers eight problems which it had not'
    ' solved within 401,026 tokens in 61 decode tokens once their solutions are'
    ' grafted.')


def sentences(lines: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the findings of a flywheel run.

  Args:
    lines: all, or those in front of its findings.
  """
  bodies = [(line['kind'], line['body']) for line in lines]
  figures = {b['id']: b['value'] for kind, b in bodies if kind == 'summary'}
  return list(_sentences(bodies[0][1], figures))


def _sentences(
    run: Mapping[str, Any], f: Mapping[str, Any]
) -> Iterator[str]:
  config = run['config']
  last = config['rounds']
  first = {what: f'bare/1/{what}' for what in ('greedy', 'vote', 'ladder')}
  bare = [
      f'{name} {_of(f, first[what])}' for what, name in (
          ('greedy', 'one greedy solution'), ('vote', 'a vote of samples'),
          ('ladder', 'the whole ladder, where the check picks the answer'))
      if f'{first[what]}/count' in f]
  yield (f'Without the library, at most {config["budget"]:,} tokens a problem:'
         f' right are {", ".join(bare)}, with'
         f' {f[first["ladder"] + "/decoded"]:,} tokens decoded.')
  yield (f'Entries: {f["entries"]} of {f["problems"]} problems, each verified'
         f' before it was added ({f["entries/programs"]} by independent'
         ' programs that agree and never see an answer key,'
         f' {f["entries/key"]} by the key); {f["entries/model"]} were solved by'
         f' the model itself, {f["entries/provided"]} by programs that came'
         ' with the dataset.')
  read, replayed, given = (
      f'recurrence/{last}/{what}' for what in ('read', 'replayed', 'given'))
  if f.get(f'{read}/count'):
    decoded, ladder = f[f'{read}/decoded'], f[f'{first["ladder"]}/decoded']
    yield ('Seen again (exact address, graft of the own entry): asked for the'
           f' answer at once, the model reads {_of(f, read)} rightly out of the'
           f' graft, with {decoded:,} tokens decoded in all (median'
           f' {_number(f[read + "/decoded_median"])} an answer)' + (
               f', {_ratio(ladder, decoded)} fewer than without'
               if f[f'{read}/right'] else '')
           + f'; asked for the solution, {_of(f, replayed)}, with'
           f' {f[replayed + "/decoded"]:,} tokens in {f[replayed + "/steps"]:,}'
           f' steps, since the tokens are looked up in the graft. Given, for a'
           f' verified answer stands over a misreading, are {_of(f, given)}.'
           ' This is recall, not reasoning.')
  if f.get('parameter/0/given/count'):
    given = 'parameter/0/given'
    yield (f'Known methods with other numbers: {_of(f, given)} by running the'
           f' stored program, {f[given + "/decoded"]} tokens decoded.')
  if f.get('transfer/0/given/count'):
    yield (f'Held-out transfer (other words and numbers, one method grafted as'
           f' an example): behind the graft {_of(f, "transfer/0/grafted")}, a'
           f' vote without it {_of(f, "transfer/0/vote")}, greedy without it'
           f' {_of(f, "control/0/given/transfer")}, given by the gate'
           f' {_of(f, "transfer/0/given")}. The right answer is likelier than'
           f' three wrong ones {_of(f, "likelihood/grafted")} times behind the'
           f' graft, {_of(f, "likelihood/bare")} times bare (chance is one in'
           ' four).')
  if f.get('near/0/given/count'):
    yield (f'Near ones (a unit, word, sign or fixed number changed): of'
           f' {f["near/0/given/count"]} the library answers'
           f' {f["near/0/given/hits"]}, wrongly'
           f' {f["near/0/given/wrong_hits"]}.')
  yield (f'Control, the library emptied: {_of(f, "control/0/given")} right,'
         f' {f["control/0/given/hits"]} hits. Hits in all {f["hits"]}, wrong'
         f' ones {f["wrong_hits"]}.' + (
             f' Behind grafts {f["grafts/equal"]} of {f["grafts/rows"]} logits'
             ' rows equal a fresh computation by SHA-256.'
             if 'grafts/rows' in f else ''))
  yield _PUBLISHED


def _of(f: Mapping[str, Any], name: str) -> str:
  """Returns '3 of 40', of a group's figures; 'none' where nothing was asked."""
  if f'{name}/count' not in f:
    return 'none asked'
  return f'{f[f"{name}/right"]} of {f[f"{name}/count"]}'


def _number(text: str | int) -> str:
  return f'{float(text):g}'


def _ratio(more: int, less: int) -> str:
  return f'{more / less:.1f} times' if less else 'all'
