"""Writes the golden numbers that the tests compare with.

    python scripts/make_goldens.py [--out=tests/testdata] [--real]

`goldens.json` (model tiny:0) has tolerance goldens, which hold everywhere and
come from the float64 reference forward, and bit goldens, one entry a numerics
class: this run adds or confirms the entries of its own class and keeps the
others. Bits of a listed class may change only after NUMERICS_VERSION has been
raised; the file then starts anew. `--real` writes `goldens_270m.json`, from
the float64 reference forward on the real weights as well.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import numerics
from kvgraft_jax import reference
from kvgraft_jax.checkpoints import resolve

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECIPE = {
    'model': 'tiny:0',
    'tokens': 'tests/model_helpers.tokens(200)',
    'rows': [0, 1, 23, 24, 63, 64, 150, 199],
}
REAL_ROWS = [0, 1, 4, 31, 127, 128, 255, 300, 400, 511, 512, 513, 540, 580, 599]


def _helpers():
  sys.path.insert(0, str(ROOT / 'tests'))
  import model_helpers
  return model_helpers


def tiny_logits() -> list:
  """Returns the float64 reference's logits of the recipe's rows: 16 of each."""
  helpers = _helpers()
  checkpoint = resolve.resolve('tiny:0', 'float32')
  rows = reference.logits(
      checkpoint.params, checkpoint.config, helpers.tokens(200),
      RECIPE['rows'], dtype=np.float64)
  return [[round(float(x), 6) for x in row[::20]] for row in rows]


def bit_golden(model: engine.Model) -> dict:
  """Returns the hashes of the recipe on `model`, and its class."""
  helpers = _helpers()
  context = model.prefill(helpers.tokens(200))
  return {
      'class': numerics.class_fingerprint(model.numerics_class),
      'dtype': model.profile.dtype,
      'jaxlib': model.numerics_class['jaxlib'],
      'device': model.numerics_class.get(
          'cpu', model.numerics_class['device']),
      'numerics_version': model.profile.numerics_version,
      'k_sha256': helpers.cache_sha256(context, 'k'),
      'logits_sha256': context.logits_sha256(),
  }


def merge(goldens: dict | None, logits: list, entries: list[dict]) -> dict:
  """Returns `goldens` with this run's entries; other classes are kept.

  Raises:
    SystemExit: if a golden would change while NUMERICS_VERSION has not.
  """
  version = numerics.NUMERICS_VERSION
  if goldens is None or goldens['numerics_version'] != version:
    goldens = {'numerics_version': version, 'recipe': RECIPE,
               'logits': logits, 'bits': []}
  if goldens['recipe'] != RECIPE or goldens['logits'] != logits:
    raise SystemExit(
        'recipe or tolerance goldens changed: raise NUMERICS_VERSION first')
  bits = {e['class']: e for e in goldens['bits']}
  for entry in entries:
    if bits.get(entry['class'], entry) != entry:
      raise SystemExit(
          f"bits of class {entry['class'][:12]} ({entry['dtype']}) changed:"
          ' raise NUMERICS_VERSION first')
    bits[entry['class']] = entry
  return goldens | {'bits': sorted(
      bits.values(), key=lambda e: (e['device'], e['jaxlib'], e['dtype']))}


def real_goldens() -> dict:
  """Returns logits of two prompts from the reference on real weights."""
  checkpoint = resolve.resolve('gemma3-270m', 'float32')
  params = {
      k: _host(v) for k, v in checkpoint.params.items()}
  text = (ROOT / 'kvgraft_jax/data/document.txt').read_text(encoding='utf-8')
  encode = checkpoint.tokenizer.encode
  prompts = {
      'capital': encode('The capital of France is', add_bos=True),
      'document': encode(text, add_bos=True)[:600],
  }
  result = {'model': 'gemma3-270m', 'prompts': {}}
  for name, ids in prompts.items():
    rows = [r for r in REAL_ROWS if r < len(ids) - 1] + [len(ids) - 1]
    logits = reference.logits(
        params, config_lib.PRESETS['gemma3-270m'], ids, rows, dtype=np.float64)
    found = []
    for row, values in zip(rows, logits):
      top = np.argsort(-values, kind='stable')[:4]
      some = sorted({*top.tolist(), *range(7, len(values), 32771)})
      found.append({
          'row': row, 'argmax': int(top[0]),
          'margin': round(float(values[top[0]] - values[top[1]]), 6),
          'ids': some, 'logits': [round(float(values[i]), 6) for i in some]})
    result['prompts'][name] = {
        'tokens': [int(t) for t in ids], 'rows': found}
  return result


def _host(leaf):
  if isinstance(leaf, dict):
    return {k: _host(v) for k, v in leaf.items()}
  return np.asarray(leaf)


def _dump(path: pathlib.Path, value: dict) -> None:
  path.write_text(json.dumps(value, indent=1) + '\n', encoding='utf-8')
  print(f'wrote {path}')


def main() -> None:
  """Writes the files."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default=ROOT / 'tests/testdata',
                      type=pathlib.Path, help='folder of the golden files')
  parser.add_argument('--real', action='store_true',
                      help='write goldens_270m.json instead')
  args = parser.parse_args()
  if args.real:
    _dump(args.out / 'goldens_270m.json', real_goldens())
    return
  path = args.out / 'goldens.json'
  old = json.loads(path.read_text('utf-8')) if path.exists() else None
  models = [_helpers().tiny(dtype) for dtype in numerics.DTYPES]
  _dump(path, merge(old, tiny_logits(), [bit_golden(m) for m in models]))


if __name__ == '__main__':
  main()
