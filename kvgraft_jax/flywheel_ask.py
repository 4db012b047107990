"""Asking with the library: seen again, known methods, transfer, near ones.

What the model reads behind a graft and what is given as the answer are scored
apart: a verified answer stands over a misreading of it.
"""

from __future__ import annotations

from typing import Any

from kvgraft_jax import datasets
from kvgraft_jax import engine
from kvgraft_jax import entries
from kvgraft_jax import errors
from kvgraft_jax import flywheel_work
from kvgraft_jax import gate as gate_lib
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import library as library_lib
from kvgraft_jax import resources
from kvgraft_jax import routing

Work = flywheel_work.Work


def again(
    work: Work, library: library_lib.Library, router: routing.Router,
    problem: datasets.Problem, number: int, meter: resources.Meter,
) -> None:
  """Asks a problem that was seen before, behind grafts of its own entry.

  Once for the answer alone (`read`), once for the solution (`replayed`). The
  logits that choose the first token are compared with a fresh computation.
  """
  name = f'recurrence/{number}/{problem.id}'
  if work.recorded('answer', f'{name}/given'):
    return
  route = router.route(problem.problem)
  entry = route.entry
  if entry is None or route.kind != 'exact':
    work.answer(
        f'{name}/given', problem, None, phase='recurrence', number=number,
        what='given', route=route.kind,
        decision=f'none: the library routes it as {route.kind}')
    return
  found: dict[str, Any] = {
      'phase': 'recurrence', 'number': number, 'route': route.kind,
      'entry': entry.id}
  for what, mode, tokens in (
      ('replayed', 'solution', work.settings.limits.tokens('greedy')),
      ('read', 'recall', work.settings.answer_tokens)):
    context, ask = _behind(work, library, entry, problem, mode)
    context.extend(ask)
    if what == 'read':
      _compare(work, name, number, context)
    read, done = _reply(work, context, problem, mode, tokens)
    _measure(meter, done, head_rows=1)
    work.answer(f'{name}/{what}', problem, read, what=what, **found, **done)
  agrees = read is not None and work.same(problem.rule, problem.tolerance)(
      read, entry.answer)
  work.answer(f'{name}/given', problem, entry.answer, what='given',
              decision='grafted' if agrees else 'stored, the graft was misread',
              **found, **done)


def by_route(
    work: Work, router: routing.Router, problem: datasets.Problem
) -> None:
  """Answers by what the library knows of a statement, without the model."""
  name = f'{problem.split}/{problem.id}'
  if work.recorded('answer', name):
    return
  route = router.route(problem.problem)
  answer, entry = None, route.entry
  more: dict[str, Any] = {} if entry is None else {'nearest': entry.id}
  if entry and route.kind == 'parameters':
    try:
      answer = router.answer(route, unsafe=work.settings.unsafe_exec)
    except errors.NotVerifiedError:
      pass  # The programs differ on these numbers: no answer is given.
  elif entry and route.kind == 'exact':
    answer = entry.answer
  if answer is not None:
    more = {'entry': more['nearest']}
  work.answer(name, problem, answer, phase=problem.split, number=0,
              what='given', route=route.kind, **more)


def transfer(
    work: Work, library: library_lib.Library, router: routing.Router,
    problem: datasets.Problem, meter: resources.Meter,
) -> None:
  """Asks a problem of other words behind a graft of the nearest method."""
  name = f'transfer/{problem.id}'
  if work.recorded('answer', f'{name}/given'):
    return
  route = router.route(problem.problem)
  samples, votes = _samples(work, problem)
  vote = gate_lib.count(samples, work.same(problem.rule, problem.tolerance))
  found: dict[str, Any] = {'phase': 'transfer', 'number': 0}
  work.answer(f'{name}/vote', problem, vote.answer, what='vote', **found,
              **votes)
  if problem.wrong:
    _likelihood(work, name, problem, 'bare', work.begin().extend(
        work.prompts.ask(problem.problem, 'answer')))
  grafted = None
  done: dict[str, Any] = dict.fromkeys(votes, 0)
  entry = route.entry
  if entry and route.kind == 'similar':
    found |= {'route': route.kind, 'entry': entry.id,
              'same_family': entry.family == problem.family}
    if problem.wrong:
      context, ask = _behind(work, library, entry, problem, 'answer')
      _likelihood(work, name, problem, 'grafted', context.extend(ask))
    context, ask = _behind(work, library, entry, problem, 'solution')
    grafted, done = _reply(
        work, context.extend(ask), problem, 'solution',
        work.settings.limits.tokens('greedy'))
    work.answer(f'{name}/grafted', problem, grafted, what='grafted', **found,
                **done)
  else:
    found['route'] = route.kind
  decision = work.settings.gate.decide(
      grafted, vote, work.same(problem.rule, problem.tolerance))
  both = {k: done[k] + votes[k] for k in done}
  work.answer(
      f'{name}/given', problem, decision.answer, what='given', **found, **both,
      decision=decision.why, policy=work.settings.policy,
      vote_count=vote.count, vote_samples=vote.samples)
  _measure(meter, both)


def control(
    work: Work, problem: datasets.Problem, router: routing.Router,
    meter: resources.Meter,
) -> None:
  """Asks with an emptied library: the same requests, no hit to be had."""
  name = f'control/{problem.id}'
  if work.recorded('answer', name):
    return
  route = router.route(problem.problem)
  mode, tokens = 'answer', work.settings.answer_tokens
  if problem.split == 'transfer':
    mode, tokens = 'solution', work.settings.limits.tokens('greedy')
  context = work.begin().extend(work.prompts.ask(problem.problem, mode))
  answer, done = _reply(work, context, problem, mode, tokens)
  work.answer(name, problem, answer, phase='control', number=0, what='given',
              route=route.kind, **done)
  _measure(meter, done)


def _behind(
    work: Work, library: library_lib.Library, entry: library_lib.Entry,
    problem: datasets.Problem, mode: str,
) -> tuple[engine.Context, list[int]]:
  """Returns a graft of an entry, and the ids of the question behind it."""
  context, worked = work.shown(library, entry)
  return context, work.prompts.ask(
      problem.problem, mode, context.tokens, worked)


def _reply(
    work: Work, context: engine.Context, problem: datasets.Problem, mode: str,
    tokens: int,
) -> tuple[str | None, dict[str, Any]]:
  """Returns the greedy answer behind a context, and what it took."""
  context.logits()  # The last position of a graft is run for them.
  done = {'restored': context.tokens_restored,
          'computed': context.tokens_computed}
  stop_ids, stop_when = work.prompts.stops(mode)
  one, = context.generate(tokens, stop_ids=stop_ids, stop_when=stop_when)
  answer = work.prompts.read(mode, one.text, problem.rule)
  return answer, done | {'decoded': len(one.token_ids), 'steps': one.steps}


def _compare(
    work: Work, name: str, number: int, context: engine.Context
) -> None:
  """Writes the logits behind a graft, and those of a fresh computation."""
  labels: dict[str, str | int] = {'phase': 'recurrence', 'round': number}
  fresh = work.model.prefill(context.tokens)

  def rows(what: str, one: engine.Context) -> entries.Rows:
    found = entries.logits(
        f'{name}/{what}', one.logits()[None], one.length - 1,
        profile=work.settings.dtype, group=labels | {'what': what},
        computed=one.tokens_computed, restored=one.tokens_restored)
    work.once('logits', found.id, lambda: found.body)
    return found

  body = entries.compare(
      name, rows('fresh', fresh), rows('grafted', context), labels)
  work.once('compare', name, lambda: body)


def _samples(
    work: Work, problem: datasets.Problem
) -> tuple[list[str | None], dict[str, Any]]:
  """Returns the answers of samples without the library, and what they took."""
  s = work.settings
  context = work.begin().extend(work.prompts.ask(problem.problem, 'solution'))
  done = {'restored': context.tokens_restored,
          'computed': context.tokens_computed}
  stop_ids, stop_when = work.prompts.stops('solution')
  made = context.generate(
      s.limits.tokens('vote'), temperature=s.limits.temperature, seed=s.seed,
      num_samples=s.samples, stop_ids=stop_ids, stop_when=stop_when)
  return ([work.prompts.read('solution', one.text, problem.rule)
           for one in made],
          done | {'decoded': sum(len(one.token_ids) for one in made),
                  'steps': max(one.steps for one in made)})


def _likelihood(
    work: Work, name: str, problem: datasets.Problem, what: str,
    context: engine.Context,
) -> None:
  """Writes log-likelihoods in nats of the right answer and the wrong ones."""
  values = [context.score(work.prompts.answer(answer)).logprob
            for answer in (problem.answer, *problem.wrong)]
  work.once('likelihood', f'{name}/{what}', lambda: {
      'group': {'phase': 'transfer', 'what': what}, 'problem': problem.id,
      'choices': len(values), 'logprobs': [
          ledger_lib.number(v) for v in values],
      'right': values[0] > max(values[1:])})


def _measure(
    meter: resources.Meter, done: dict[str, Any], head_rows: int = 0
) -> None:
  """Tells what a reply took."""
  meter.add(
      tokens_restored=done['restored'], tokens_computed=done['computed'],
      tokens_decoded=done['decoded'], head_rows=head_rows)
