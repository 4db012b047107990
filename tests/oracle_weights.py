"""Weights of the oracle's tiny models, made with numpy alone.

`scripts/make_oracle_goldens.py` copies these weights into transformers' models
and stores the logits in `testdata/oracle/CASE.json`; a test makes the same
weights again and compares. Every value is a bfloat16 number, so that a
bfloat16 and a float32 file of one recipe hold equal values.
"""

import base64
import fnmatch
import hashlib
import json
import math
import pathlib

import ml_dtypes
import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent / 'testdata' / 'oracle'
# numpy name -> name in a safetensors header.
_DTYPES = {'bfloat16': 'BF16', 'float32': 'F32'}


def names(outer: bool = False) -> list[str]:
  """Returns the cases of the text models, or of the multimodal outer form."""
  found = sorted(p.stem for p in FOLDER.glob('*.json'))
  return [n for n in found if n.startswith('outer_') == outer]


def load(name: str) -> dict:
  """Returns what the golden file of case `name` holds."""
  return json.loads((FOLDER / f'{name}.json').read_text(encoding='utf-8'))


def logits(golden: dict) -> np.ndarray:
  """Returns float32 [prompts, positions, vocabulary] of a golden file."""
  shape = np.shape(golden['tokens'])
  raw = b''.join(base64.b64decode(text) for text in golden['logits'])
  return np.frombuffer(raw, '<f4').reshape(*shape, -1)


def tensor(recipe: dict, name: str) -> np.ndarray:
  """Returns one tensor of a recipe: float32 of its shape.

  Values are uniform in [centre - spread, centre + spread] of the first kind
  whose pattern fits the name. They come from SHAKE-256 and not from a random
  generator, whose stream may change between releases.
  """
  shape = recipe['tensors'][name]
  centre, spread = next(
      kind['uniform'] for kind in recipe['kinds']
      if fnmatch.fnmatchcase(name, kind['names']))
  seed = f"{recipe['seed']}/{name}".encode()
  raw = hashlib.shake_256(seed).digest(2 * math.prod(shape))
  unit = (np.frombuffer(raw, '<u2') + 0.5) / 2**15 - 1  # In (-1, 1).
  values = (centre + spread * unit).astype(ml_dtypes.bfloat16)
  return values.astype(np.float32).reshape(shape)


def tensors(recipe: dict) -> dict[str, np.ndarray]:
  """Returns all tensors of a recipe by their Hugging Face names.

  Args:
    recipe: `seed` (str), `kinds` (list of {names: pattern, uniform: [centre,
      spread]}) and `tensors` (name -> shape).
  """
  return {name: tensor(recipe, name) for name in recipe['tensors']}


def sha256(arrays: dict[str, np.ndarray]) -> str:
  """Returns the hash of names and float32 values, in the order of names."""
  sha = hashlib.sha256()
  for name, array in sorted(arrays.items()):
    sha.update(name.encode() + b'\0' + array.astype('<f4').tobytes())
  return sha.hexdigest()


def outer_tensors(outer: dict, text: dict) -> dict[str, np.ndarray]:
  """Returns the tensors of a multimodal checkpoint around a text case.

  Args:
    outer: an `outer_` golden file.
    text: the golden file that its `text_case` names.

  Returns:
    The text case's weights under their outer names, and zeros for the towers.
  """
  result = {}
  for name, shape in outer['tensors'].items():
    if name.startswith(outer['text_prefix']):
      inner = 'model.' + name.removeprefix(outer['text_prefix'])
      result[name] = tensor(text['recipe'], inner)
    else:
      result[name] = np.zeros(shape, np.float32)
  return result


def write_directory(
    folder: pathlib.Path, config: dict, arrays: dict[str, np.ndarray],
    dtype: str,
) -> None:
  """Writes `config.json` and `model.safetensors` as transformers does.

  Args:
    folder: is made if missing.
    config: as in a golden file; its `dtype` becomes `dtype`.
    arrays: name -> array, cast to `dtype`.
    dtype: 'bfloat16' or 'float32'.
  """
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(
      json.dumps(config | {'dtype': dtype}, indent=2, sort_keys=True) + '\n',
      encoding='utf-8')
  header: dict[str, dict] = {'__metadata__': {'format': 'pt'}}
  blobs, end = [], 0
  for name, array in sorted(arrays.items()):
    blobs.append(array.astype(np.dtype(dtype)).tobytes())
    start, end = end, end + len(blobs[-1])
    header[name] = {'dtype': _DTYPES[dtype], 'shape': list(array.shape),
                    'data_offsets': [start, end]}
  head = json.dumps(header, separators=(',', ':')).encode('utf-8')
  head += b' ' * (-len(head) % 8)
  with (folder / 'model.safetensors').open('wb') as file:
    file.write(len(head).to_bytes(8, 'little') + head + b''.join(blobs))


def write_case(
    folder: pathlib.Path, case: str, dtype: str = 'float32'
) -> pathlib.Path:
  """Writes the directory of a case; returns `folder`."""
  golden = load(case)
  write_directory(
      folder, golden['config'], tensors(golden['recipe']), dtype)
  return folder
