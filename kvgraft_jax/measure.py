"""Measurements beside the self-test: reported, never part of a class.

    python -m kvgraft_jax.measure SPEC DTYPE CHUNK TILE PAGE

prints the self-test's base digest; NPROC sets the threads of such a process.
"""

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np

from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import layers
from kvgraft_jax import selftest
from kvgraft_jax.checkpoints import tree

SLICES = (2, 4, 8)
HEAD = 'embedder/input_embedding'
_LOOKED_UP = 'embedder/per_layer_embedding'  # In no product.


@dataclasses.dataclass(frozen=True)
class Columns:
  """Whether a matmul's columns depend on how many are computed at once.

  Attributes:
    name: of a weight with this shape.
    out: output columns O.
    inner: summed dimension I.
    rows: of the other operand.
    equal: parts in which the columns are cut -> whether all bits are equal;
      None where O cannot be cut so.
  """

  name: str
  out: int
  inner: int
  rows: int
  equal: dict[int, bool | None]


def thread_digests(
    model: engine.Model, counts: Iterable[int]
) -> dict[int, str]:
  """Returns threads -> digest of the self-test's base case in a process.

  Raises:
    KvgraftError: if such a process fails.
  """
  profile = model.profile
  command = [
      sys.executable, '-m', 'kvgraft_jax.measure', model.source, profile.dtype,
      str(profile.chunk), str(profile.tile), str(profile.page)]
  result = {}
  for count in counts:
    done = subprocess.run(
        command, env=os.environ | {'NPROC': str(count)}, capture_output=True,
        text=True, check=False)
    if done.returncode:
      last = (done.stderr.strip().splitlines() or ['no message'])[-1]
      raise errors.KvgraftError(
          f'the measurement with {count} threads failed: {last}')
    result[count] = done.stdout.split()[-1]
  return result


def shapes(model: engine.Model) -> dict[tuple[int, int], str]:
  """Returns (O, I) of every matmul shape -> the first weight that has it."""
  found: dict[tuple[int, int], str] = {}
  for name, weight in tree.flatten(model.params):
    if weight.ndim == 2 and name != _LOOKED_UP:
      found.setdefault(weight.shape, name)
  return found


def columns(
    model: engine.Model,
    progress: Callable[[int, int], None] | None = None,
) -> list[Columns]:
  """Compares slices of every matmul shape with the whole, at tile and chunk.

  The head's shape is compared at the tile alone, which is all it runs at.
  """
  options = dict(model.profile.compiler_options)
  weights = dict(tree.flatten(model.params))
  cases = [
      (name, rows) for name in shapes(model).values()
      for rows in sorted({model.profile.tile, model.profile.chunk})
      if name != HEAD or rows == model.profile.tile]
  rng = np.random.Generator(np.random.PCG64(20260802))
  found = []
  for number, (name, rows) in enumerate(cases):
    weight = weights[name]
    out, inner = weight.shape
    x = jax.numpy.asarray(rng.standard_normal((rows, inner), np.float32))
    product = jax.jit(layers.matmul, compiler_options=options)
    whole = np.asarray(product(x, weight))
    equal: dict[int, bool | None] = {}
    for parts in SLICES:
      if out % parts:
        equal[parts] = None
        continue
      size = out // parts
      cut = [np.asarray(product(x, weight[i * size:(i + 1) * size]))
             for i in range(parts)]
      equal[parts] = np.concatenate(cut, 1).tobytes() == whole.tobytes()
    found.append(Columns(name, out, inner, rows, equal))
    if progress:
      progress(number + 1, len(cases))
  return found


def main(argv: list[str]) -> None:
  """Prints the base digest of the model that `argv` names."""
  spec, dtype, chunk, tile, page = argv
  model = engine.load_model(
      spec, dtype=dtype, chunk=int(chunk), tile=int(tile), page=int(page),
      self_test=False)
  print(selftest.base_digest(model.config, model.profile, model.params))


if __name__ == '__main__':
  main(sys.argv[1:])
