"""Bodies of the usual ledger lines, made of models, artifacts and logits.

LEDGER.md says what each field means. KL and largest differences have six
significant digits; 0.0 stands for equal bits and for nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import datetime
import hashlib
from typing import Any

import numpy as np

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import engine
from kvgraft_jax import hashing
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import numerics
from kvgraft_jax import recheck
from kvgraft_jax import results
from kvgraft_jax import sampling

Body = dict[str, Any]


def run(
    name: str, model: engine.Model, config: Mapping[str, Any],
    command: Sequence[str],
) -> Body:
  """Returns the first line of a run.

  Args:
    name: of the kind of run.
    model: what runs.
    config: all that a replay needs.
    command: the command line.
  """
  now = datetime.datetime.now(datetime.UTC)
  return {
      'format': recheck.FORMAT, 'run': name, 'command': list(command),
      'config': dict(config), 'code': ledger_lib.code_version(),
      'model': {
          'source': model.source, 'fingerprint': model.fingerprint,
          'tokenizer': model.tokenizer_fingerprint,
          'template': model.template_fingerprint},
      'created': now.strftime('%Y-%m-%dT%H:%M:%SZ')}


def write_profile(
    ledger: ledger_lib.Ledger, model: engine.Model, id: str
) -> None:
  """Writes the numerics of a model, and the verdict of its self-test."""
  report = model.self_test()
  ledger.append('profile', _profile(
      id, model.profile.factors(), model.numerics_class, report.to_json()))
  ledger.verdict(
      f'self_test/{id}', 'self_test', {'dtype': model.profile.dtype}, [],
      {n: bool(report.invariances.get(n)) for n in numerics.REQUIRED},
      passed=report.exact)


def bare_profile(id: str, factors: Mapping[str, str]) -> Body:
  """Returns numerics that no self-test covers: every factor is of the class."""
  return _profile(id, factors, factors, {})


def _profile(
    id: str, factors: Mapping[str, str], in_class: Mapping[str, str],
    self_test: Body,
) -> Body:
  return {
      'id': id, 'profile': dict(factors), 'class': dict(in_class),
      'profile_fingerprint': hashing.json_sha256(
          'kvgraft.profile', dict(factors)),
      'class_fingerprint': numerics.class_fingerprint(in_class),
      'self_test': self_test}


def plain_factors() -> dict[str, str]:
  """Returns what may fix the bits of the plain NumPy forward in float64."""
  blas = np.show_config(mode='dicts')['Build Dependencies']['blas']
  environment = numerics.environment()
  factors: dict[str, str] = {
      'dtype': 'float64', 'backend': 'numpy', 'numpy': np.__version__,
      'blas': f'{blas["name"]} {blas["version"]}'}
  factors |= {name: environment[name] for name in (
      'machine', 'cpu', 'cpu_features', 'threads') if name in environment}
  return factors


def input(
    id: str, tokens: Sequence[int], *, text: str | None = None,
    keep_text: bool = True, keep_tokens: bool = False,
) -> Body:
  """Returns the hashes of a text and its tokens.

  Args:
    id: of the line.
    tokens: ids.
    text: where they come from; None if from nothing.
    keep_text: False for a text that may not be copied.
    keep_tokens: whether the ids are kept as well.
  """
  body: Body = {
      'id': id, 'tokens': len(tokens),
      'tokens_sha256': hashing.tokens_sha256(tokens),
      'sha256': 'none' if text is None else hashlib.sha256(
          text.encode()).hexdigest()}
  if text is not None and keep_text:
    body['text'] = text
  if keep_tokens:
    body['token_ids'] = [int(t) for t in tokens]
  return body


def artifact(
    manifest: artifact_lib.Manifest, *, id: str, profile: str, input: str,
    store: str,
) -> Body:
  """Returns an artifact's id and the digests of its blocks.

  Args:
    manifest: of the artifact.
    id: of the line.
    profile: id of its numerics.
    input: id of its tokens.
    store: its path below the run directory, '' if it is not kept.
  """
  fields = manifest.fields
  return {'id': id, 'artifact': manifest.id, 'key': manifest.key,
          'start': fields.start, 'end': fields.end, 'profile': profile,
          'input': input, 'store': store, 'digests': results.digests(manifest)}


@dataclasses.dataclass(frozen=True)
class Rows:
  """Logits at some positions, and the line that holds their hashes.

  Attributes:
    values: [n, V], float32 or float64.
    body: of the line.
  """

  values: np.ndarray
  body: Body

  @property
  def id(self) -> str:
    """Of the line."""
    return self.body['id']


def logits(
    id: str, values: np.ndarray, first: int, *, profile: str,
    group: Mapping[str, str | int], computed: int, restored: int,
) -> Rows:
  """Returns logits with the hash of each row's little-endian bytes.

  Args:
    id: of the line.
    values: [n, V].
    first: position of the first row.
    profile: id of the numerics.
    group: labels.
    computed: positions that were run for them.
    restored: positions that were taken from a store.
  """
  little = values.astype(values.dtype.newbyteorder('<'), copy=False)
  return Rows(values, {
      'id': id, 'profile': profile, 'group': dict(group),
      'rows': list(range(first, first + len(values))),
      'sha256': [hashlib.sha256(row.tobytes()).hexdigest() for row in little],
      'argmax': [int(row.argmax()) for row in values],
      'tokens_computed': computed, 'tokens_restored': restored})


def compare(
    id: str, a: Rows, b: Rows, group: Mapping[str, str | int]
) -> Body:
  """Returns how logits b differ from logits a, row by row.

  KL(a || b) is in nats.
  """
  kl, apart = [], []
  for p, q in zip(a.values, b.values):
    kl.append(_figure(sampling.kl_divergence(p, q)))
    apart.append(_figure(abs(
        p.astype(np.float64) - q.astype(np.float64)).max()))

  def agreeing(field: str) -> int:
    return sum(x == y for x, y in zip(a.body[field], b.body[field]))

  return {'id': id, 'a': a.id, 'b': b.id, 'group': dict(group),
          'rows': len(a.values), 'equal': agreeing('sha256'),
          'argmax_agree': agreeing('argmax'), 'kl': kl, 'max_abs': apart}


def _figure(value: float) -> str:
  return ledger_lib.number(float(f'{value:.6g}'))
