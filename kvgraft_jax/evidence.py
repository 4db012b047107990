"""The evidence run: what is exact, what is not, and why, into a ledger.

Three parts. `fifty`: a text is deposited by another process and grafted here,
fifty times with other tails behind it and at several lengths, against a fresh
computation. `invariance`: one text by every schedule. `study`: the own-position
study. Every hash and figure goes into the ledger as it is made; totals and
verdicts are derived from its lines by the rules that anybody can repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import Any

from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import entries
from kvgraft_jax import errors
from kvgraft_jax import evidence_parts
from kvgraft_jax import findings
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import numerics
from kvgraft_jax import recheck
from kvgraft_jax import study

PARTS = tuple(evidence_parts.PARTS)
DOCUMENT = pathlib.Path(__file__).parent / 'data' / 'document.txt'

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Settings:
  """What an evidence run does; two runs of equal settings can be compared.

  Attributes:
    model: as `load_model` takes it.
    parts: of `PARTS`.
    dtypes: in which `fifty` and `invariance` run, and cases of `study`.
    chunk: rows of a prefill step; None for the default. So `tile`, `page`.
    tile: rows of a decode step.
    page: positions of an attention partial.
    text_file: UTF-8 text, repeated until it is long enough; None for the
      document that comes with the package.
    tokens: that `fifty` deposits.
    continuations: tails behind them.
    lengths: at which the artifact is grafted as well.
    tail: tokens behind such a length, and behind a block of `study`.
    schedule_tokens: that `invariance` runs.
    block: tokens of a block of `study`.
    samples: texts of `study`.
    offsets: of `study`; 0 is a control.
    cases: of `study`, names.
  """

  model: str = 'gemma3-270m'
  parts: tuple[str, ...] = PARTS
  dtypes: tuple[str, ...] = numerics.DTYPES
  chunk: int | None = None
  tile: int | None = None
  page: int | None = None
  text_file: str | None = None
  tokens: int = 4203
  continuations: int = 50
  lengths: tuple[int, ...] = (8, 128, 1024, 4096)
  tail: int = 64
  schedule_tokens: int = 700
  block: int = 576
  samples: int = 2
  offsets: tuple[int, ...] = (0, 8, 128, 1024, 4096)
  cases: tuple[str, ...] = tuple(study.CASES)

  def __post_init__(self):
    for name, known in (('parts', PARTS), ('dtypes', numerics.DTYPES),
                        ('cases', tuple(study.CASES))):
      found = getattr(self, name)
      for item in found:
        if item not in known:
          raise errors.UsageError(
              f'{name}: expected some of {", ".join(known)}, found {item!r}')
      if not found or len(set(found)) < len(found):
        raise errors.UsageError(
            f'{name}: expected one or more different ones of'
            f' {", ".join(known)}, found {", ".join(found) or "none"}')
    for name, least in (('tokens', 2), ('continuations', 1), ('tail', 1),
                        ('schedule_tokens', 32), ('block', 2), ('samples', 1)):
      if getattr(self, name) < least:
        raise errors.UsageError(
            f'{name}: expected at least {least}, found {getattr(self, name)}')
    for name in ('lengths', 'offsets'):
      found = getattr(self, name)
      if len(set(found)) < len(found):
        raise errors.UsageError(
            f'{name}: expected different numbers, found {_words(found)}')
    if any(not 0 < n <= self.tokens for n in self.lengths):
      raise errors.UsageError(
          f'lengths: expected 1 to {self.tokens}, the tokens that are'
          f' deposited, found {_words(self.lengths)}')
    if not self.offsets or min(self.offsets) < 0:
      raise errors.UsageError(
          'offsets: expected numbers from 0 on, found'
          f' {_words(self.offsets) or "none"}')

  def to_json(self) -> dict[str, Any]:
    """Returns the form that stands in the ledger."""
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()}

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> Settings:
    """Returns the settings that `to_json` wrote.

    Raises:
      UsageError: if it is not their form.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if set(value) != set(fields):
      wrong = sorted(set(value) ^ set(fields))
      raise errors.UsageError(
          f'settings of an evidence run: expected the fields'
          f' {", ".join(fields)}, found other ones: {", ".join(wrong)}')
    found: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in value.items()}
    for name, field in fields.items():
      if not _is_of(found[name], str(field.type)):
        raise errors.UsageError(
            f'settings of an evidence run: {name} is {value[name]!r:.80},'
            f' expected {field.type}; take them from a run')
    return cls(**found)


def default_settings(model: str, **changes: Any) -> Settings:
  """Returns settings that fit a model, small ones where it is tiny."""
  if model.partition(':')[0] in config_lib.TINY_PRESETS:
    small: dict[str, Any] = {
        'tokens': 203, 'lengths': (8, 24, 64, 160), 'tail': 8,
        'schedule_tokens': 101, 'block': 48, 'offsets': (0, 8, 16, 128, 1024)}
    return Settings(model=model, **(small | changes))
  return Settings(model=model, **changes)


def _is_of(value: Any, annotation: str) -> bool:
  """Tells whether a value is of a setting's type, as it is annotated."""
  kind, _, rest = annotation.partition('[')
  if kind == 'tuple':
    item = rest.partition(',')[0]
    return isinstance(value, tuple) and all(_is_of(x, item) for x in value)
  return type(value).__name__.replace('Type', '') in annotation.split(' | ')


def _words(numbers: Sequence[int]) -> str:
  return ', '.join(map(str, numbers))


def run(
    settings: Settings, directory: str | os.PathLike[str], *,
    command: Sequence[str] = (), registration: Mapping[str, str] | None = None,
    before_end: Callable[[ledger_lib.Ledger], None] | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
  """Runs and records everything.

  Args:
    settings: what to do.
    directory: of the run; must hold none yet. The artifacts stay in `store`
      below it.
    command: the command line, for the record.
    registration: body of a `registration` line, of what was committed before.
    before_end: called with the ledger in front of its last line.
    progress: called with (what, done, in all).

  Returns:
    The directory.

  Raises:
    UsageError: if settings and model do not fit, or there is a run already.
    KvgraftError: as loading, deposit and graft do.
  """
  folder = pathlib.Path(directory)
  models = _Models(settings, progress)
  text, ids = _text(settings, models)  # Refused before there is a ledger.
  with ledger_lib.Ledger(folder, create=True) as ledger:
    model = models(settings.dtypes[0])
    ledger.append('run', entries.run(
        'evidence', model, settings.to_json(), command))
    if registration:
      ledger.append('registration', registration)
    ledger.append('input', entries.input(
        'text', ids[:settings.tokens], text=text, keep_text=False))
    for dtype in settings.dtypes:
      entries.write_profile(ledger, models(dtype), dtype)
    work = evidence_parts.Work(settings, folder, ledger, models, ids, progress)
    for part in settings.parts:
      evidence_parts.PARTS[part](work)
    for text in findings.sentences(ledger.lines):
      ledger.append('note', {'role': findings.ROLE, 'text': text,
                             'rules': findings.version(ledger.lines)})
    if before_end:
      before_end(ledger)
    ledger.append('end', {'status': 'done'})
  return folder


class _Models:
  """The run's model in each dtype, loaded when it is first needed."""

  def __init__(self, settings: Settings, progress: Progress | None):
    self._settings, self._progress = settings, progress
    self._loaded: dict[str, engine.Model] = {}

  def __call__(self, dtype: str) -> engine.Model:
    if dtype not in self._loaded:
      s, progress = self._settings, self._progress
      self._loaded[dtype] = engine.load_model(
          s.model, dtype=dtype, chunk=s.chunk, tile=s.tile, page=s.page,
          progress=progress and (lambda case, done, total: progress(
              f'self-test {dtype}', done, total)))
    return self._loaded[dtype]


def _text(settings: Settings, models: _Models) -> tuple[str, list[int]]:
  """Returns the text and ids enough for every part, the text repeated."""
  s = settings
  path = pathlib.Path(s.text_file) if s.text_file else DOCUMENT
  try:
    text = recheck.read_file(os.fspath(path)).decode('utf-8')
  except ValueError as e:  # A pipe could not be read again by a replay.
    raise errors.UsageError(
        f'text_file {path}: {e}; give a readable UTF-8 file') from None
  model = models(s.dtypes[0])
  if model.tokenizer is None:
    raise errors.UsageError(
        f'model {s.model!r} has no tokenizer; choose one that has')
  ids = model.tokenizer.encode(text, add_bos=True)
  if len(ids) < 2:
    raise errors.UsageError(f'text_file {path} is empty; give a text')
  longest = evidence_parts.positions(s)
  if longest > model.capacity:
    raise errors.CapacityError(
        f'this run needs {longest} positions, found a model of'
        f' {model.capacity}; choose fewer tokens or smaller offsets')
  most = max(s.tokens + s.tail, s.schedule_tokens,
             s.samples * (s.block + s.tail))
  once = ids[1:]
  while len(ids) < most:
    ids += once
  return text, ids[:most]
