"""Solving with effort, verifying, depositing: the first half of a round."""

from __future__ import annotations

import dataclasses
import logging

from kvgraft_jax import checkers
from kvgraft_jax import datasets
from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import entries
from kvgraft_jax import errors
from kvgraft_jax import flywheel_work
from kvgraft_jax import gate as gate_lib
from kvgraft_jax import grafting
from kvgraft_jax import hashing
from kvgraft_jax import ladder as ladder_lib
from kvgraft_jax import library as library_lib
from kvgraft_jax import resources
from kvgraft_jax import routing

_LOG = logging.getLogger(__name__)
# Rungs that are climbed whatever comes out: what the model does by itself.
_BARE = ('greedy', 'vote')


def solve(
    work: flywheel_work.Work, library: library_lib.Library,
    router: routing.Router, problem: datasets.Problem, number: int,
    meter: resources.Meter,
) -> None:
  """Climbs the ladder for a problem, and deposits what passes the check.

  Args:
    work: of the run.
    library: to add to.
    router: of the library.
    problem: that has no entry yet.
    number: of the round; from the second on the nearest method stands in front.
    meter: told what was run.
  """
  begin, front, worked = work.begin, None, None
  if number > 1:
    begin, front, worked = _nearest(work, library, router, problem)
  s = work.settings
  ladder = ladder_lib.Ladder(
      work.prompts, s.limits, begin, front, worked, seed=s.seed + number - 1,
      unsafe=s.unsafe_exec)
  prefix = f'{number}/{problem.id}'
  tried: list[ladder_lib.Attempt] = []
  passed: tuple[ladder_lib.Attempt, engine.Context | None] | None = None
  verify = _Verifier(work, problem)
  for rungs in (_BARE, [r for r in s.rungs if r not in _BARE]):
    for attempt, context in ladder.climb(
        problem.problem, problem.rule, rungs,
        lambda rung, i: _recall(work, f'{prefix}/{rung}/{i}')):
      _record(work, f'{prefix}/{attempt.rung}/{attempt.sample}', problem,
              attempt, number)
      restored = attempt.tokens_restored if attempt.tokens_computed else 0
      meter.add(tokens_restored=restored, start=attempt.tokens_restored,
                tokens_computed=attempt.tokens_computed,
                tokens_decoded=attempt.tokens_decoded)
      tried.append(attempt)
      if passed is None and verify(attempt.answer):
        passed = attempt, context
        if rungs is not _BARE:
          break
    if passed:
      break
  _say(work, problem, number, tried, passed)
  if passed and passed[1] is None and passed[0].rung != 'vote' and (
      passed[0].mode != 'program'):  # An earlier process had the context.
    passed = passed[0], ladder.after(problem.problem, passed[0])
  _deposit(work, library, problem, number, passed)


def _nearest(work, library, router, problem):
  """Returns how a context begins behind the nearest method, if there is one.

  Its own statement, which another run may have added, is none.
  """
  for entry, _ in router.similar(problem.problem, 4):
    if entry.address != problem.sha256:
      context, worked = work.shown(library, entry)
      return context.fork, list(context.tokens), worked
  return work.begin, None, None


class _Verifier:
  """Tells whether an answer is right, by programs if there are, else the key.

  The programs run once a problem; no answer key is seen then.
  """

  def __init__(self, work: flywheel_work.Work, problem: datasets.Problem):
    self._work, self._problem = work, problem
    self._agreed: str | None = None
    if len(problem.programs) > 1:
      self._agreed = checkers.programs_agree(
          problem.programs, [problem.parameters], problem.rule,
          tolerance=problem.tolerance,
          unsafe=work.settings.unsafe_exec).answer

  def __call__(self, answer: str | None) -> bool:
    p = self._problem
    expected = self._agreed if len(p.programs) > 1 else p.answer
    if answer is None or expected is None:
      return False
    return self._work.same(p.rule, p.tolerance)(answer, expected)


def _record(work, name, problem, attempt, number) -> None:
  """Writes an attempt; its text only where that may be copied."""
  found = dataclasses.asdict(attempt)
  text, ids = found.pop('text'), list(found.pop('token_ids'))
  if work.keep_texts:
    found |= {'text': text, 'token_ids': ids}
  group = {'rung': found.pop('rung'), 'round': number}
  work.once('attempt', name, lambda: {
      'group': group, 'problem': problem.id, **found,
      'tokens_sha256': hashing.tokens_sha256(ids)})


def _recall(work, name) -> ladder_lib.Attempt | None:
  """Returns what an earlier process made, if all of it was written."""
  body = work.recorded('attempt', name)
  if body is None or 'text' not in body:
    return None
  fields = {f.name for f in dataclasses.fields(ladder_lib.Attempt)}
  values = {k: v for k, v in body.items() if k in fields}
  return ladder_lib.Attempt(
      **values | {'rung': body['group']['rung'],
                  'token_ids': tuple(body['token_ids'])})


def _say(work, problem, number, tried, passed) -> None:
  """Writes what the model answers by itself, by rung."""
  same = work.same(problem.rule, problem.tolerance)

  def write(what, answer, attempts):
    work.answer(
        f'{what}/{number}/{problem.id}', problem, answer, phase='bare',
        number=number, what=what,
        restored=max(a.tokens_restored for a in attempts),
        computed=sum(a.tokens_computed for a in attempts),
        decoded=sum(a.tokens_decoded for a in attempts),
        steps=sum(a.steps for a in attempts if a.tokens_computed))

  greedy = [a for a in tried if a.rung == 'greedy']
  bare = [a for a in tried if a.rung in _BARE]
  if greedy:
    write('greedy', greedy[0].answer, greedy)
  if any(a.rung == 'vote' for a in tried):
    write('vote', gate_lib.count([a.answer for a in bare], same).answer, bare)
  write('ladder', passed[0].answer if passed else gate_lib.count(
      [a.answer for a in tried], same).answer, tried)


def _deposit(work, library, problem, number, passed) -> None:
  """Adds what passed to the library, and its context to the store."""
  answer, solution = problem.answer, problem.solution
  provenance = {'problem': problem.id, 'round': number, 'source': 'provided'}
  worked = context = None
  if passed:
    attempt, context = passed
    answer, solution = attempt.answer, attempt.text.strip()
    provenance |= {'source': 'model', 'rung': attempt.rung}
    if context is not None:
      worked = work.prompts.generated(
          problem.problem, attempt.mode, attempt.text)
    if worked:
      solution, provenance['mode'] = worked.reply, worked.mode
  elif len(problem.programs) < 2:
    return  # Nothing that could be verified.
  if len(problem.programs) > 1:
    made = library_lib.from_problem(problem)
  else:
    made = library_lib.Candidate(
        problem.problem, solution, answer, problem.rule, 'key',
        problem.family, expected=problem.answer, tolerance=problem.tolerance)
  made = dataclasses.replace(
      made, solution=solution, answer=answer, provenance=provenance)
  try:
    entry = library.add(**vars(made), unsafe=work.settings.unsafe_exec)
  except (errors.NotVerifiedError, errors.UsageError) as e:
    _LOG.warning('%s: no entry: %s', problem.id, e)
    reason = str(e) if work.keep_texts else type(e).__name__
    work.once('refused', f'{number}/{problem.id}', lambda: {
        'group': {'round': number, 'source': provenance['source']},
        'problem': problem.id, 'reason': reason})
    return
  if worked and context is not None:
    # The preamble stands in front of it: it becomes a child.
    artifact = depositing.deposit(work.model, work.store, context)
  else:
    worked = work.prompts.written(problem.problem, solution, answer)
    front = work.begin()
    ids = work.prompts.front(worked)
    artifact = depositing.deposit(
        work.model, work.store, front.extend(ids[front.length:]))
  library.attach(
      entry.id, model=work.model.fingerprint,
      numerics_class=work.numerics_class, artifact=artifact.id,
      store=work.place)
  name = problem.id
  work.once('input', name, lambda: entries.input(
      name, grafting.chain_tokens(
          work.store, grafting.chain(work.store, artifact))))
  work.once('artifact', name, lambda: entries.artifact(
      artifact.manifest, id=name, profile=work.settings.dtype, input=name,
      store=work.place))
  if not work.recorded('verdict', f'verified/{name}'):
    work.ledger.verdict(
        f'verified/{name}', 'verified',
        {'checker': made.checker, 'entry': entry.id,
         'hash': entry.checker['ran']},
        [], entry.checker['evidence'], passed=True)
  work.once('entry', name, lambda: {
      'group': {'round': number, 'source': provenance['source'],
                'checker': made.checker},
      'problem': name, 'entry': entry.id, 'artifact': artifact.id,
      'generated': 'mode' in provenance,
      'tokens': artifact.length, 'library_head': library.head})
