"""The library of verified solutions: one SQLite file, only ever appended to.

Records are canonical JSON, named by their hash and chained. An entry is what
was verified; its verifications, its retraction and the artifacts that hold its
text are records of their own. Nothing takes a verdict: `add` runs the checker,
and importing from elsewhere runs it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import pathlib
from typing import Any
from typing import NamedTuple

from kvgraft_jax import checkers
from kvgraft_jax import datasets
from kvgraft_jax import entry_checks
from kvgraft_jax import errors
from kvgraft_jax import parameters as parameters_lib
from kvgraft_jax import records as records_lib
from kvgraft_jax import sandbox
from kvgraft_jax import statements

FILE = records_lib.FILE
Candidate = entry_checks.Candidate
Record = records_lib.Record
Path = records_lib.Path

_KEPT = records_lib.KEPT
_LIMITS = sandbox.Limits()
_COMPARED = ('integer', 'rational', 'decimal', 'choice')
_TOGETHER = 5000  # Candidates that are verified, then written, at once.
# Fields of the records that an import takes beside entries; all are text.
_TEXTS = {'source': ('text',), 'retraction': ('entry', 'reason'),
          'artifact': ('entry', 'model', 'class', 'artifact', 'store')}


@dataclasses.dataclass(frozen=True)
class Entry:
  """A verified solution.

  Attributes:
    id: hash of what was verified.
    problem: the statement as it was given.
    canonical: its canonical form.
    address: hash of the canonical form.
    template: skeleton of the statement.
    family: problems with one method; '' for none.
    solution: worked method.
    answer: the verified answer.
    rule: how answers are compared.
    tolerance: of the rule; None where it takes none.
    program: source that answers other numbers; None if there is none.
    programs: sources of all programs, that one first.
    parameters: schema of the statement's numbers; None if there is none.
    checker: kind, instances, expected, limits, and of the newest verification
      passed, evidence, ran and unsafe.
    provenance: where it comes from.
    sequence: place in the order of creation.
  """

  id: str
  problem: str
  canonical: str
  address: str
  template: str
  family: str
  solution: str
  answer: str
  rule: str
  tolerance: str | None
  program: str | None
  programs: tuple[str, ...]
  parameters: parameters_lib.Schema | None
  checker: dict[str, Any]
  provenance: dict[str, Any]
  sequence: int

  @property
  def candidate(self) -> Candidate:
    """What is verified again."""
    return Candidate(
        self.problem, self.solution, self.answer, self.rule,
        self.checker['kind'], self.family, self.parameters, self.programs,
        tuple(self.checker['instances']), self.checker['expected'],
        self.tolerance, self.provenance,
        entry_checks.limits_from(self.checker['limits']))

  def to_json(self) -> dict[str, Any]:
    """Returns all fields."""
    return dataclasses.asdict(self)


class Imported(NamedTuple):
  """What an import did.

  Attributes:
    added: how many entries are new.
    present: how many were there already, and stay as they are.
    refused: the others that were not retracted, each with the reason.
  """

  added: int
  present: int
  refused: list[tuple[Candidate, str]]


def same_answer(first: Entry, other: Entry) -> bool:
  """Tells whether two entries have one answer, however it is written."""
  if first.answer == other.answer:
    return True
  if first.rule != other.rule or first.rule not in _COMPARED:
    return False
  return checkers.same(first.rule, other.answer, first.answer)


def from_problem(
    problem: datasets.Problem, *, provenance: Mapping[str, Any] | None = None,
    limits: sandbox.Limits = _LIMITS,
) -> Candidate:
  """Returns a problem of a dataset with programs as a candidate.

  Its schema is used if it gives the problem's own values, or else the programs
  are checked on those values alone.

  Raises:
    UsageError: if the problem has fewer than two programs, or a malformed
      schema.
  """
  if len(problem.programs) < 2:
    raise errors.UsageError(
        f'problem {problem.id!r}: expected two or more programs, found'
        f' {len(problem.programs)}; give the answer key or a programs file')
  if problem.schema:
    parameters_lib.check(problem.schema)
  read = problem.schema and parameters_lib.read(
      statements.template(problem.problem), problem.schema)
  own = dict(problem.parameters)
  fits = bool(read) and read == own
  return Candidate(
      problem.problem, problem.solution, problem.answer, problem.rule,
      'programs', problem.family, problem.schema if fits else None,
      problem.programs,
      tuple(problem.instances) if fits else (own,) if own else (),
      tolerance=problem.tolerance,
      provenance={'problem': problem.id, **(provenance or {})}, limits=limits)


class Library:
  """A library in a directory. A context manager; one thread uses it.

  Two processes may add at the same time, and one that is killed at any moment
  leaves what was there before its last call, or after it.
  """

  def __init__(self, path: Path, create: bool = False):
    """Opens a library.

    Args:
      path: of its directory.
      create: begin one where there is none.

    Raises:
      NotFoundError: if there is none.
      UsageError: if the file is another program's.
      DamageError: if it is no database.
      StorageError: if it cannot be opened.
    """
    self._records = records_lib.Records(path, create)
    self._sources: dict[str, str] = {}

  def __enter__(self) -> Library:
    return self

  def __exit__(self, *unused_exc_info) -> None:
    self.close()

  def close(self) -> None:
    """Closes the file; calling it again does nothing."""
    self._records.close()

  @property
  def path(self) -> pathlib.Path:
    """The library's directory."""
    return self._records.path

  @property
  def head(self) -> str:
    """Hash over all records in their order; 64 zeros without any."""
    return self._records.head

  # Reading.

  def _entry(self, place: int, name: str, record: Record) -> Entry:
    programs = tuple(map(self._source, record['programs']))
    checks = self._newest('verification', name)
    if checks is None:
      raise errors.DamageError(
          f'{self._records.file}: entry {name} has no verification; restore the'
          ' library from a copy')
    checker = record['checker'] | {
        key: checks[key] for key in ('passed', 'evidence', 'ran', 'unsafe')}
    return Entry(
        name, record['problem'], record['canonical'], record['address'],
        record['template'], record['family'], record['solution'],
        record['answer'], record['rule'], record['tolerance'],
        programs[0] if programs and record['parameters'] is not None else None,
        programs, record['parameters'], checker, record['provenance'], place)

  def _newest(self, kind: str, entry: str) -> Record | None:
    found = self._records.find(
        'subject = ? AND kind = ? ORDER BY seq DESC LIMIT 1', entry, kind)
    return found[0][2] if found else None

  def _source(self, name: str) -> str:
    if name not in self._sources:
      found = [record for _, _, record in self._records.find(
          "id = ? AND kind = 'source'", name)]
      if not found:
        raise errors.DamageError(
            f'{self._records.file}: the source {name} is missing; restore the'
            ' library from a copy')
      self._sources[name] = found[0]['text']
    return self._sources[name]

  def get(self, ref: str) -> Entry:
    """Returns the entry with an id or with a unique beginning of one.

    Raises:
      NotFoundError: if there is none.
      UsageError: if there is more than one.
    """
    found = self._records.find(
        "kind = 'entry' AND id >= ? AND id < ? LIMIT 2", ref, ref + 'g'
    ) if ref and set(ref) <= set('0123456789abcdef') else []
    if len(found) > 1:
      raise errors.UsageError(
          f'{self.path}: several entries begin with {ref!r}; give more'
          ' digits')
    if not found:
      raise errors.NotFoundError(
          f'{self.path}: there is no entry {errors.quoted(ref)}; `kvgraft'
          f' library ls {self.path}` shows all')
    return self._entry(*found[0])

  def entries(
      self, family: str | None = None, retracted: bool = False
  ) -> Iterator[Entry]:
    """Yields entries in the order of their creation.

    Args:
      family: only its entries; None for all.
      retracted: True includes those that were retracted.
    """
    where, values = "kind = 'entry'", []
    if family is not None:
      where += ' AND family = ?'
      values.append(family)
    if not retracted:
      where += f' AND {_KEPT}'
    for found in self._records.every(where, *values):
      yield self._entry(*found)

  def canonicals(self) -> Iterator[tuple[str, str]]:
    """Yields id and canonical form of all entries that are not retracted."""
    for _, name, record in self._records.every(f"kind = 'entry' AND {_KEPT}"):
      yield name, record['canonical']

  def by_address(self, address: str) -> list[Entry]:
    """Returns the entries of a statement, newest first, none retracted."""
    found = self._records.find(
        f'address = ? AND {_KEPT} ORDER BY seq DESC', address)
    return [self._entry(*one) for one in found if one[2]['address'] == address]

  def conflicts(self, address: str) -> list[Entry]:
    """Returns the entries of a statement if their answers are not the same."""
    found = self.by_address(address)
    differ = any(not same_answer(found[0], other) for other in found[1:])
    return found if differ else []

  def by_template(self, skeleton: str) -> list[Entry]:
    """Returns the entries of a template, newest first, none retracted."""
    found = self._records.find(
        f'template = ? AND {_KEPT} ORDER BY seq DESC',
        records_lib.template_id(skeleton))
    return [self._entry(*one) for one in found
            if one[2]['template'] == skeleton]

  def methods(self, skeleton: str) -> Iterator[Entry]:
    """Yields the newest entry of each parameterised program of a template."""
    seen: list[str] = []
    while found := self._records.find(
        'template = ? AND method IS NOT NULL AND method NOT IN'
        f' ({", ".join("?" * len(seen))}) AND {_KEPT}'
        ' ORDER BY seq DESC LIMIT 1',
        records_lib.template_id(skeleton), *seen):
      place, name, record = found[0]
      method = records_lib.method_id(record)
      if method in seen or record['template'] != skeleton:
        raise errors.DamageError(
            f'{self._records.file}: record {place} is indexed as another;'
            f' `kvgraft library stats {self.path}` checks all')
      seen.append(method)
      yield self._entry(place, name, record)

  def retraction(self, entry_id: str) -> str | None:
    """Returns why an entry was retracted, None if it was not."""
    found = self._newest('retraction', entry_id)
    return None if found is None else found['reason']

  def artifact(
      self, entry_id: str, model: str, numerics_class: str
  ) -> str | None:
    """Returns the newest artifact of an entry for a model and class."""
    for _, _, record in self._records.find(
        "subject = ? AND kind = 'artifact' ORDER BY seq DESC", entry_id):
      if (record['model'], record['class']) == (model, numerics_class):
        return record['artifact']
    return None

  def artifacts(self, entry_id: str) -> list[Record]:
    """Returns the artifact records of an entry, oldest first."""
    return [record for _, _, record in self._records.find(
        "subject = ? AND kind = 'artifact' ORDER BY seq", entry_id)]

  # Writing.

  def add(
      self, problem: str, solution: str, answer: str, rule: str, checker: str,
      *, family: str = '', program: str | None = None,
      parameters: parameters_lib.Schema | None = None,
      programs: Sequence[str] = (),
      instances: Sequence[Mapping[str, int | str]] = (),
      expected: str | None = None, tolerance: str | None = None,
      provenance: Mapping[str, Any] | None = None,
      limits: sandbox.Limits = _LIMITS, unsafe: bool = False,
  ) -> Entry:
    """Runs the checker and, if it passes, adds an entry.

    Args:
      problem: the statement.
      solution: worked method.
      answer: the answer.
      rule: one of checkers.RULES.
      checker: 'programs', 'key' or 'tests', see `Candidate`.
      family: problems with one method.
      program: source that answers other numbers; by default programs[0].
      parameters: schema of the statement's numbers.
      programs: sources.
      instances: further parameters to check the programs on.
      expected: the key, or the tests.
      tolerance: of the rule.
      provenance: where it comes from.
      limits: of each run.
      unsafe: run programs although they cannot be kept apart here.

    Returns:
      The entry; the one that is there if the same was added before.

    Raises:
      NotVerifiedError: if the checker does not pass.
      UsageError: if the request is malformed, or the entry was retracted.
      SandboxError: if programs cannot be kept apart here, and not `unsafe`.
      StorageError: if it cannot be written; nothing has changed.
    """
    sources = [s for s in programs if s != program]
    candidate = Candidate(
        problem, solution, answer, rule, checker, family, parameters,
        tuple(sources if program is None else [program, *sources]),
        tuple(instances), expected, tolerance, provenance or {}, limits)
    candidate.check_form()
    outcome = entry_checks.verify(candidate, unsafe=unsafe)
    if not outcome.passed:
      raise errors.NotVerifiedError(
          f'{errors.quoted(problem)} was not added: {outcome.why}; correct the'
          ' answer or the check')
    with self._records.transaction():
      name = self._write(candidate, outcome, unsafe)
      reason = self.retraction(name)
    if reason is not None:
      raise errors.UsageError(
          f'entry {name} was retracted ({errors.shortened(reason, 80)}) and'
          ' stays so; add it with another provenance')
    return self.get(name)

  def add_all(
      self, candidates: Iterable[Candidate], *, unsafe: bool = False
  ) -> tuple[int, list[tuple[Candidate, str]]]:
    """Adds what passes; candidates with the same programs share processes.

    Args:
      candidates: what to add.
      unsafe: as in `add`.

    Returns:
      How many are in the library now, and the others, each with the reason.

    Raises:
      KvgraftError: as `add` does, but for single candidates.
    """
    count, refused = 0, []
    waiting = iter(candidates)
    while part := list(itertools.islice(waiting, _TOGETHER)):
      good = []
      for candidate in part:
        try:
          candidate.check_form()
          good.append(candidate)
        except errors.UsageError as e:
          refused.append((candidate, str(e)))
      outcomes = list(entry_checks.verify_all(good, unsafe=unsafe))
      with self._records.transaction():
        for candidate, outcome in zip(good, outcomes):
          why = outcome.why
          if outcome.passed:
            name = self._write(candidate, outcome, unsafe)
            reason = self.retraction(name)
            why = '' if reason is None else f'was retracted: {reason}'
          if why:
            refused.append((candidate, why))
          else:
            count += 1
    return count, refused

  def _write(
      self, c: Candidate, outcome: entry_checks.Outcome, unsafe: bool
  ) -> str:
    """Appends entry and verification unless they are there; returns the id."""
    sources = []
    for text in c.programs:
      source: Record = {'kind': 'source', 'text': text}
      sources.append(self._records.once(source))
    template = statements.template(c.problem)
    record: Record = {
        'kind': 'entry', 'problem': c.problem,
        'canonical': statements.canonical(c.problem),
        'address': statements.address(c.problem),
        'template': template.skeleton, 'family': c.family,
        'solution': c.solution, 'answer': c.answer, 'rule': c.rule,
        'tolerance': c.tolerance, 'programs': sources,
        'parameters': None if c.parameters is None else [
            dict(item) for item in c.parameters],
        'checker': {'kind': c.checker,
                    'instances': [dict(values) for values in c.instances],
                    'expected': c.expected,
                    'limits': entry_checks.limits_json(c.limits)},
        'provenance': dict(c.provenance)}
    name = records_lib.name_of(records_lib.canonical(record))
    if not self._records.has(name):
      self._records.append(record)
      self._records.append(_verification(name, outcome, unsafe))
    return name

  def attach(
      self, entry_id: str, *, model: str, numerics_class: str, artifact: str,
      store: str,
  ) -> None:
    """Records which artifact holds an entry's text.

    Args:
      entry_id: of the entry.
      model: fingerprint of the model.
      numerics_class: fingerprint of the class.
      artifact: id of the artifact.
      store: where it is.
    """
    name = self.get(entry_id).id
    with self._records.transaction():
      self._records.append({'kind': 'artifact', 'entry': name, 'model': model,
                    'class': numerics_class, 'artifact': artifact,
                    'store': store})

  def retract(self, entry_id: str, reason: str) -> None:
    """Takes an entry out of use for good; the same again does nothing.

    Raises:
      UsageError: without a reason, or if it was retracted for another one.
      NotFoundError: if there is no such entry.
    """
    if not reason.strip():
      raise errors.UsageError('the reason is missing; say why')
    name = self.get(entry_id).id
    with self._records.transaction():
      self._retract(name, reason)
      before = self.retraction(name)
    if before is not None and before != reason:
      raise errors.UsageError(
          f'entry {name} was retracted already'
          f' ({errors.shortened(before, 200)}); its reason stays')

  def _retract(self, name: str, reason: str) -> None:
    if self.retraction(name) is None:
      self._records.append(
          {'kind': 'retraction', 'entry': name, 'reason': reason})

  def reverify(
      self, entry_id: str | None = None, *, unsafe: bool = False
  ) -> list[tuple[str, entry_checks.Outcome]]:
    """Runs the checkers again; what does not pass is retracted.

    Args:
      entry_id: of one entry; None for all that are not retracted.
      unsafe: as in `add`.

    Returns:
      Id and outcome of each.
    """
    entries = (
        self.entries() if entry_id is None else iter([self.get(entry_id)]))
    result = []
    while part := list(itertools.islice(entries, _TOGETHER)):
      outcomes = list(entry_checks.verify_all(
          [entry.candidate for entry in part], unsafe=unsafe))
      with self._records.transaction():
        for entry, outcome in zip(part, outcomes):
          self._records.append(_verification(entry.id, outcome, unsafe))
          if not outcome.passed:
            self._retract(
                entry.id, f'failed when verified again: {outcome.why}')
          result.append((entry.id, outcome))
    return result

  # As a whole.

  def stats(self) -> dict[str, Any]:
    """Returns counts and the head."""
    kinds = dict(self._records.rows(
        'SELECT kind, count(*) FROM records GROUP BY kind'))
    kept = f"FROM records e WHERE kind = 'entry' AND {_KEPT}"
    families = dict(self._records.rows(
        f'SELECT family, count(*) {kept} GROUP BY family'))
    (templates,), = self._records.rows(
        f'SELECT count(DISTINCT template) {kept}')
    count = sum(families.values())
    return {'entries': count, 'retracted': kinds.get('entry', 0) - count,
            'families': families, 'templates': templates,
            'records': sum(kinds.values()), 'kinds': kinds, 'head': self.head}

  def check(self) -> int:
    """Checks every record, the chain and the indices; returns the count.

    Raises:
      DamageError: naming what is not as it was written.
    """
    return self._records.check()

  def export(self, path: Path) -> int:
    """Writes all records to a new JSONL file; returns how many.

    Raises:
      UsageError: if the file exists.
      StorageError: if it cannot be written.
    """
    return self._records.export(path)

  def import_(self, path: Path, *, unsafe: bool = False) -> Imported:
    """Adds the entries of an export whose checkers pass here and now.

    Verdicts in the file count for nothing. What was retracted there is
    retracted here as well. Artifacts are taken as they stand.

    Args:
      path: of the export.
      unsafe: as in `add`.

    Raises:
      NotFoundError: if there is no such file.
      UsageError: if it is no export.
      DamageError: if it is no whole export.
      KvgraftError: as `add_all` does.
    """
    records, candidates = read_export(path)
    gone = {r['entry'] for _, r in records if r['kind'] == 'retraction'}
    present, new, retracted, beyond = 0, [], [], []
    for name, candidate in candidates.items():
      if name in gone:
        if not (_generous(candidate.limits)
                or self._records.has(name, 'entry')):
          retracted.append(candidate)
      elif (self._records.has(name, 'entry')
            and self.retraction(name) is None):
        present += 1
      elif _generous(candidate.limits):
        beyond.append((candidate, 'its programs ask for limits that a file'
                       ' may not set; add it by hand'))
      else:
        new.append(candidate)
    added, refused = self.add_all(new, unsafe=unsafe)
    with self._records.transaction():
      for name, record in records:
        if record['kind'] == 'retraction':
          # Without its entry, too: whoever adds that later is told.
          self._retract(record['entry'], record['reason'])
        elif record['kind'] == 'artifact' and not self._records.has(name) and (
            self._records.has(record['entry'], 'entry')):
          self._records.append(record)
    # They are retracted by now; what does not pass is not even shown.
    self.add_all(retracted, unsafe=unsafe)
    return Imported(added, present, [*refused, *beyond])


def read_export(
    path: Path
) -> tuple[list[tuple[str, Record]], dict[str, Candidate]]:
  """Reads an export and checks its form; nothing runs.

  Args:
    path: of the export.

  Returns:
    (id and content of each record; entry's id -> what may be verified).

  Raises:
    NotFoundError: if there is no such file.
    UsageError: if it is no export.
    DamageError: if it is no whole export.
  """
  records = records_lib.read_export(pathlib.Path(path))
  for name, record in records:
    fields = _TEXTS.get(record['kind'], ())
    if fields and set(record) != {'kind', *fields} or not all(
        isinstance(record[field], str) for field in fields):
      raise errors.DamageError(
          f'{path}: {record["kind"]} {name} is malformed, expected'
          f' {", ".join(fields)}; export it again')
  sources = {name: r['text'] for name, r in records if r['kind'] == 'source'}
  candidates = {}
  for name, record in records:
    if record['kind'] == 'entry':
      try:
        candidates[name] = _candidate(record, sources)
      except (AttributeError, KeyError, TypeError, ValueError,
              errors.UsageError) as e:
        raise errors.DamageError(
            f'{path}: entry {name} is malformed ({e!r:.80}); export it'
            ' again') from None
  return records, candidates


def _generous(limits: sandbox.Limits) -> bool:
  """Tells whether limits are far beyond the default ones."""
  return any(value > 10 * getattr(_LIMITS, name)
             for name, value in dataclasses.asdict(limits).items())


def _verification(
    name: str, outcome: entry_checks.Outcome, unsafe: bool
) -> Record:
  return {'kind': 'verification', 'entry': name, 'passed': outcome.passed,
          'evidence': outcome.evidence, 'ran': outcome.ran, 'unsafe': unsafe}


def _candidate(record: Record, sources: Mapping[str, str]) -> Candidate:
  """Returns what an entry's record says was verified."""
  checker = record['checker']
  return Candidate(
      record['problem'], record['solution'], record['answer'], record['rule'],
      checker['kind'], record['family'], record['parameters'],
      tuple(sources[name] for name in record['programs']),
      tuple(checker['instances']), checker['expected'], record['tolerance'],
      record['provenance'], entry_checks.limits_from(checker['limits']))
