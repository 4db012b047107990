"""The verified-knowledge flywheel: solve, verify, deposit, ask again.

A round solves what is not solved yet, with effort; verifies by a sound check;
adds what passed to the library and deposits its context; and asks everything
again, behind grafts. Every attempt, answer and figure goes into the ledger.
Four things are kept apart, since they are not the same: answers without the
library, problems seen before, known methods with other numbers, and transfer
to problems of another wording. What an emptied library does is always shown.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import os
import pathlib
import tempfile
from typing import Any

from kvgraft_jax import datasets
from kvgraft_jax import engine
from kvgraft_jax import entries
from kvgraft_jax import errors
from kvgraft_jax import findings
from kvgraft_jax import flywheel_ask
from kvgraft_jax import flywheel_solve
from kvgraft_jax import flywheel_totals
from kvgraft_jax import flywheel_work
from kvgraft_jax import gate as gate_lib
from kvgraft_jax import ladder
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import library as library_lib
from kvgraft_jax import prompts
from kvgraft_jax import recheck
from kvgraft_jax import routing
from kvgraft_jax import sandbox
from kvgraft_jax import store as store_lib

Progress = Callable[[str, int, int], None]
_STORE, _LIBRARY = 'store', 'library'


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a flywheel run does.

  Attributes:
    model: as `load_model` takes it.
    dtype: of weights, operands and cache.
    chunk: rows of a prefill step; None for the default. So `tile`, `page`.
    tile: rows of a decode step.
    page: positions of an attention partial.
    capacity: most positions of a context; None for the model's.
    dataset: 'shipped', or a JSONL file with id, problem and answer.
    programs: JSONL file of verified programs for the dataset, or None.
    limit: problems of the dataset to take; None for all.
    style: of `prompts.STYLES`.
    rounds: how often to solve, verify, deposit and ask again.
    budget: tokens to decode for one problem of a round.
    samples: that vote.
    temperature: of the samples.
    seed: of the samples.
    rungs: of `ladder.RUNGS`.
    answer_tokens: most tokens of an answer that is asked for at once.
    policy: of `gate.POLICIES`.
    unsafe_exec: run programs where they cannot be kept apart.
  """

  model: str = 'gemma3-270m'
  dtype: str = 'bfloat16'
  chunk: int | None = None
  tile: int | None = None
  page: int | None = None
  capacity: int | None = None
  dataset: str = datasets.SHIPPED
  programs: str | None = None
  limit: int | None = None
  style: str = 'plain'
  rounds: int = 2
  budget: int = 512
  samples: int = 4
  temperature: float = 0.8
  seed: int = 0
  rungs: tuple[str, ...] = ladder.RUNGS
  answer_tokens: int = 24
  policy: str = 'vote'
  unsafe_exec: bool = False

  def __post_init__(self):
    for name, least in (('rounds', 1), ('answer_tokens', 1), ('limit', 1),
                        ('seed', 0)):
      found = getattr(self, name)
      if found is not None and found < least:
        raise errors.UsageError(
            f'{name}: expected at least {least}, found {found}')
    if not 0 < self.temperature < 100:
      raise errors.UsageError(
          'temperature: expected a number above 0 and below 100, found'
          f' {self.temperature}')
    if self.style not in prompts.STYLES:
      raise errors.UsageError(
          f'style: expected one of {", ".join(prompts.STYLES)}, found'
          f' {self.style!r:.40}')
    _ = self.limits, self.gate  # Raise what is wrong with them.

  @property
  def limits(self) -> ladder.Limits:
    """How hard to try."""
    return ladder.Limits(
        self.budget, self.samples, self.temperature, self.rungs)

  @property
  def gate(self) -> gate_lib.Gate:
    """When a vote stands against a graft."""
    return gate_lib.Gate(self.policy, least=self.samples)

  def to_json(self) -> dict[str, Any]:
    """Returns the form that stands in the ledger."""
    found = dataclasses.asdict(self)
    return found | {'rungs': list(self.rungs),
                    'temperature': ledger_lib.number(self.temperature)}

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> Settings:
    """Returns the settings that `to_json` wrote.

    Raises:
      UsageError: if it is not their form.
    """
    known = {f.name: f.default for f in dataclasses.fields(cls)}
    for name in set(known) ^ set(value):
      raise errors.UsageError(
          f'settings of a flywheel run: {name!r:.40} is missing or unknown;'
          ' take them from a run')
    found = dict(value)
    try:
      found['temperature'] = float(value['temperature'])
      found['rungs'] = tuple(value['rungs'])
    except (TypeError, ValueError) as e:
      raise errors.UsageError(
          f'settings of a flywheel run: {e}; take them from a run') from None
    for name, item in found.items():
      like: Any = known[name]
      kind = {'programs': str}.get(name, int) if like is None else type(like)
      if type(item) is not kind and (item, like) != (None, None):
        raise errors.UsageError(
            f'settings of a flywheel run: {name} is {item!r:.80}, expected'
            f' {kind.__name__}; take them from a run')
    return cls(**found)


def run(
    settings: Settings, directory: str | os.PathLike[str], *,
    library: str | os.PathLike[str] | None = None, store: str | None = None,
    command: Sequence[str] = (), resume: bool = False,
    registration: Mapping[str, str] | None = None,
    before_end: Callable[[ledger_lib.Ledger], None] | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
  """Runs and records everything.

  Args:
    settings: what to do.
    directory: of the run; must hold none yet, unless it is resumed.
    library: directory of the library; None for one below the run.
    store: of the artifacts; None for one below the run.
    command: the command line, for the record.
    resume: go on with a run that did not come to its end.
    registration: body of a `registration` line, of what was committed before.
    before_end: called with the ledger in front of its last line.
    progress: called with (what, done, in all).

  Returns:
    The directory.

  Raises:
    UsageError: if settings and model do not fit, or there is a run already.
    SandboxError: if programs cannot be kept apart here.
    KvgraftError: as loading, deposit, graft and library do.
  """
  folder = pathlib.Path(directory)
  problems, sources = _problems(settings)
  if not settings.unsafe_exec and (reason := sandbox.unavailable()):
    raise errors.SandboxError(
        f'programs cannot be kept apart here: {reason}; pass --unsafe_exec if'
        ' you trust the model and the dataset')
  model = engine.load_model(
      settings.model, dtype=settings.dtype, chunk=settings.chunk,
      tile=settings.tile, page=settings.page, capacity=settings.capacity,
      progress=progress and (
          lambda case, done, total: progress('self-test', done, total)))
  asked = prompts.Prompts(model, settings.style)
  _check_room(settings, model, asked, problems)
  with library_lib.Library(
      library or folder / _LIBRARY, create=True) as kept, (
          ledger_lib.Ledger(folder, create=not resume)) as ledger:
    work = flywheel_work.Work(
        settings, ledger, model, asked,
        store_lib.Store(store or str(folder / _STORE), create=True), problems,
        keep_texts=_shipped(settings.dataset),
        place='' if store else _STORE, progress=progress)
    _begin(work, command, sources, registration)
    _phases(work, kept)
    _write_findings(ledger)
    if before_end:
      before_end(ledger)
    ledger.append('end', {'status': 'done'})
  return folder


def _shipped(dataset: str) -> bool:
  return dataset.partition(':')[0] == datasets.SHIPPED


def _problems(
    settings: Settings,
) -> tuple[list[datasets.Problem], dict[str, str]]:
  """Returns the problems, and the SHA-256 of each file they come from."""
  # One that names no split is to be solved.
  problems = [dataclasses.replace(p, split=p.split or 'base')
              for p in datasets.load(settings.dataset)]
  sources = {}
  if settings.programs is not None:
    offered = datasets.load_programs(settings.programs)
    problems = [offered[p.id].join(p) if p.id in offered else p
                for p in problems]
  for name in ('dataset', 'programs'):
    path = getattr(settings, name)
    if path is not None and not _shipped(path):
      data = pathlib.Path(path).read_bytes()
      sources[name] = hashlib.sha256(data).hexdigest()
  if not any(p.split == 'base' for p in problems):
    raise errors.UsageError(
        f'{settings.dataset}: there is no problem of the split "base", which is'
        ' what gets solved; give a dataset that has some')
  for problem in problems:
    if problem.rule not in recheck.SCORES:
      raise errors.UsageError(
          f'{settings.dataset}: problem {problem.id!r} has the rule'
          f' {problem.rule!r}, expected one that a ledger derives again:'
          f' {", ".join(recheck.SCORES)}')
  if settings.limit is not None:
    base = [p for p in problems if p.split == 'base'][:settings.limit]
    families = {p.family for p in base}
    problems = base + [p for p in problems if p.split != 'base'
                       and p.family in families]
  return problems, sources


def _check_room(
    settings: Settings, model: engine.Model, asked: prompts.Prompts,
    problems: Sequence[datasets.Problem],
) -> None:
  """Raises CapacityError where a problem has no room behind itself, solved."""
  for p in problems:
    front = asked.front(asked.written(p.problem, p.solution, p.answer))
    need = 2 * len(front) + settings.budget
    if need > model.capacity:
      raise errors.CapacityError(
          f'{settings.dataset}: problem {p.id!r} needs {need} positions, worked'
          f' and asked again with {settings.budget} new tokens, found a'
          f' capacity of {model.capacity}; leave it out, or lower --budget')


def _begin(
    work: flywheel_work.Work, command: Sequence[str], sources: dict[str, str],
    registration: Mapping[str, str] | None,
) -> None:
  """Writes the first lines, or checks that a resumed run has the same."""
  ledger, config = work.ledger, work.settings.to_json()
  if ledger.lines:
    first = ledger.lines[0]['body']
    if first['run'] != 'flywheel' or first['config'] != config:
      wrong = [n for n in config if first['config'].get(n) != config[n]]
      raise errors.UsageError(
          f'{ledger.path}: it is a {first["run"]} run of other settings'
          f' ({", ".join(wrong) or "all"}); resume with those it was begun'
          ' with')
    if first['model']['fingerprint'] != work.model.fingerprint:
      raise errors.IncompatibleError(
          f'{ledger.path}: it was begun with another model; give that one',
          'model')
    recorded = [line['body']['sources'] for line in ledger.lines
                if line['kind'] == 'dataset']
    if recorded and recorded != [sources]:
      raise errors.UsageError(
          f'{ledger.path}: the dataset or the programs are not those it was'
          ' begun with; restore them')
    if ledger.lines[-1]['kind'] == 'end':
      raise errors.UsageError(f'{ledger.path}: the run came to its end already')
    ledger.append('resumed', {
        'code': ledger_lib.code_version(), 'command': list(command)})
  else:
    ledger.append('run', entries.run('flywheel', work.model, config, command))
    if registration:
      ledger.append('registration', registration)
  if not work.recorded('profile', work.settings.dtype):
    entries.write_profile(ledger, work.model, work.settings.dtype)
  work.once('dataset', 'dataset', lambda: {
      'name': pathlib.Path(work.settings.dataset).name, 'sources': sources,
      'problems': len(work.problems)})
  for p in work.problems:
    body = {
        'group': {'split': p.split, 'family': p.family},
        'rule': p.rule, 'statement_sha256': p.sha256, 'expected': p.answer,
        'programs': len(p.programs),
        **({'text': p.problem} if work.keep_texts else {})}
    work.once('problem', p.id, functools.partial(dict, body))


def _phases(work: flywheel_work.Work, library: library_lib.Library) -> None:
  """Runs every phase of every round, and writes the totals."""
  base = work.split('base')
  router = routing.Router(library)
  for number in range(1, work.settings.rounds + 1):
    with work.meter('solve', number) as meter:
      for problem in work.each(f'round {number}: solve', base):
        if not work.recorded('entry', problem.id):
          flywheel_solve.solve(work, library, router, problem, number, meter)
    with work.meter('recurrence', number) as meter:
      for problem in work.each(f'round {number}: ask again', base):
        if work.recorded('entry', problem.id):
          flywheel_ask.again(work, library, router, problem, number, meter)
  with work.meter('by route', 0):
    for problem in work.each('by route', work.split('parameter', 'near')):
      flywheel_ask.by_route(work, router, problem)
  with work.meter('transfer', 0) as meter:
    for problem in work.each('transfer', work.split('transfer')):
      flywheel_ask.transfer(work, library, router, problem, meter)
  with tempfile.TemporaryDirectory(prefix='kvgraft-control-') as place, (
      library_lib.Library(place, create=True)) as empty, (
          work.meter('control', 0)) as meter:
    router = routing.Router(empty)
    for problem in work.each(
        'control', work.split('base', 'parameter', 'transfer')):
      flywheel_ask.control(work, problem, router, meter)
  flywheel_totals.write(work)


def _write_findings(ledger: ledger_lib.Ledger) -> None:
  """Writes what was found, but for what is written already."""
  written = [line['body']['text'] for line in ledger.lines
             if line['kind'] == 'note']
  for text in findings.sentences(ledger.lines):
    if text not in written:
      ledger.append('note', {'role': findings.ROLE, 'text': text,
                             'rules': findings.version(ledger.lines)})
