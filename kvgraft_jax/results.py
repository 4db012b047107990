"""What of a ledger another run can be held against: hashes, scores, factors.

Values alone: nothing here needs a model or a store.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
from typing import Any

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing

FINGERPRINTS = ('model', 'tokenizer', 'template')
ABSENT = 'not listed'

# Kind -> (id, part) -> value; kinds in the order in which one causes the next.
Results = dict[str, dict[tuple[str, str], str]]


def collect(lines: Sequence[Mapping[str, Any]]) -> Results:
  """Returns every result of a ledger that another run can be held against.

  Args:
    lines: of a ledger, or of a registration: objects with `kind` and `body`.

  Raises:
    UsageError: if a line lacks what its kind must have.
  """
  found: Results = {kind: {} for kind in (
      'input', 'tokens', 'block', 'logits', 'argmax', 'artifact', 'digest',
      'output', 'score')}
  for line in lines:
    try:
      _add_results(found, line['kind'], line['body'])
    except (KeyError, TypeError, ValueError, AttributeError,
            OverflowError) as e:
      name = line.get('kind') if isinstance(line, Mapping) else line
      raise errors.UsageError(
          f'line {line.get("n", "?") if isinstance(line, Mapping) else "?"}'
          f' ({name!s:.40}) has not what such a line must have'
          f' ({type(e).__name__}: {e!s:.60}); expected a ledger of an evidence'
          ' run') from None
  return found


def _add_results(found: Results, kind: str, body: Mapping[str, Any]) -> None:
  if kind == 'input':
    found['input'][body['id'], 'sha256'] = body['sha256']
    found['tokens'][body['id'], 'sha256'] = body['tokens_sha256']
  elif kind == 'artifact':
    found['artifact'][body['id'], 'id'] = body['artifact']
    for layer, start, part, kind, stop, digest in blocks(body):
      name = f'layer {layer} ({kind}) {part} positions {start} to {stop - 1}'
      found['block'][body['id'], name] = digest
  elif kind == 'logits':
    rows = zip(body['rows'], body['sha256'], body['argmax'], strict=True)
    for i, (row, sha256, argmax) in enumerate(rows):
      found['logits'][body['id'], f'row {i} position {row}'] = sha256
      found['argmax'][body['id'], f'row {i} position {row}'] = str(argmax)
  elif kind == 'output':
    if 'token_ids' in body:
      found['output'][body['id'], 'tokens'] = hashing.tokens_sha256(
          body['token_ids'])
  elif kind == 'digest':
    found['digest'][body['id'], 'sha256'] = body['sha256']
  elif kind == 'score':
    found['score'][body['id'], 'value'] = text(body['value'])


def digests(manifest: artifact_lib.Manifest) -> list[dict[str, Any]]:
  """Returns an artifact's digests as an `artifact` line holds them."""
  found = []
  for kind, layout in manifest.layouts.items():
    names = [[layer, part] for layer in layout.layers
             for part in artifact_lib.PARTS]
    for block, parts in zip(manifest.geometries[kind].blocks,
                            manifest.digests[kind]):
      found.append({
          'kind': kind, 'start': block.start, 'stop': block.stop,
          'parts': [[*name, digest] for name, digest in zip(names, parts)]})
  return found


def blocks(
    body: Mapping[str, Any]
) -> list[tuple[int, int, str, str, int, str]]:
  """Returns (layer, start, K or V, kind, stop, digest), lowest layer first."""
  return sorted(
      (layer, block['start'], part.upper(), block['kind'], block['stop'],
       digest)
      for block in body['digests'] for layer, part, digest in block['parts'])


def count(a: Results, b: Results) -> dict[str, dict[str, int]]:
  """Returns how many results of each kind are equal, differ, or lack a side."""
  counts = {}
  for kind, ours in a.items():
    theirs = b[kind]
    common = ours.keys() & theirs.keys()
    equal = sum(ours[key] == theirs[key] for key in common)
    counts[kind] = {
        'equal': equal, 'differing': len(common) - equal,
        'only_a': len(ours) - len(common), 'only_b': len(theirs) - len(common)}
  return counts


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
  """Returns (name, a, b) of every entry that differs, by name."""
  found = []
  for name in sorted({*a, *b}):
    left = text(a[name]) if name in a else ABSENT
    right = text(b[name]) if name in b else ABSENT
    if left != right:
      found.append((name, left, right))
  return found


def text(value: Any) -> str:
  """Returns a string as it is, anything else as JSON."""
  return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
