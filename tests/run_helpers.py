"""Small run directories of real deposits, for tests that compare runs."""

import copy
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvgraft_jax as kv
from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import hashing
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import numerics
from kvgraft_jax import recorder as recorder_lib

BLOCK = 16


def flip(
    context: engine.Context, side: str, layer: int, position: int, head: int,
    element: int, *, base: int = 0,
) -> tuple[engine.Context, float]:
  """Flips one bit of K or V in a copy of a context.

  Args:
    context: stays as it is.
    side: 'K' or 'V'.
    layer: number in the model.
    position: of the value.
    head: kv head.
    element: of the head.
    base: first sliding position that the copy can still deposit.

  Returns:
    The copy, and by how much the value changed.
  """
  model = context.model
  kind = model.config.layers[layer]
  row = model.config.kind_layers(kind).index(layer)
  copied = jax.tree.map(jnp.copy, context.cache)  # The next step takes it over.
  arrays = dict(getattr(copied, side.lower()))
  array = np.array(arrays[kind])
  slot = position
  if kind == config_lib.SLIDING:
    margin = model.profile.chunk
    slot = margin + position % (array.shape[2] - 2 * margin)
  at = row, 0, slot, head, element
  dtype = jnp.dtype(model.profile.dtype)
  before = float(array[at].view(dtype))
  array[at] ^= 1 << 5  # A bit of the mantissa: the value stays finite.
  change = abs(float(array[at].view(dtype)) - before)
  arrays[kind] = jax.device_put(array)
  cache = cache_lib.KVCache(
      arrays if side == 'K' else copied.k, arrays if side == 'V' else copied.v,
      copied.scalars)
  other = model.context()
  other.restore(context.tokens, cache, recorder_lib.Recorder(
      model.config, model.profile, base))
  return other, change


def lines_of(
    directory: pathlib.Path, context: engine.Context, *, sliding: str = 'full'
) -> list[tuple[str, dict[str, Any]]]:
  """Deposits a context into DIR/store; returns (kind, body) of a small run."""
  model = context.model
  store = kv.Store(str(directory / 'store'))
  made = kv.deposit(
      model, store, context, block=BLOCK, sliding=sliding).manifest
  digests = [
      {'kind': kind, 'start': block.start, 'stop': block.stop, 'parts': [
          [layer, part.lower(), parts[2 * i + j]]
          for i, layer in enumerate(made.layouts[kind].layers)
          for j, part in enumerate(artifact_lib.PARTS)]}
      for kind in made.layouts
      for block, parts in zip(made.geometries[kind].blocks, made.digests[kind])]
  logits = context.logits()
  return copy.deepcopy([
      ('run', {
          'format': 1, 'run': 'test', 'command': ['test'],
          'config': {'model': model.source, 'sizes': {'block': BLOCK}},
          'code': {'version': '1', 'sources': '2' * 64, 'python': '3'},
          'model': {
              'source': model.source, 'fingerprint': model.fingerprint,
              'tokenizer': model.tokenizer_fingerprint,
              'template': model.template_fingerprint},
          'created': '2026-11-29T20:00:00Z'}),
      ('profile', {
          'id': model.profile.dtype, 'profile': model.profile.factors(),
          'class': model.numerics_class,
          'profile_fingerprint': model.profile.fingerprint,
          'class_fingerprint': numerics.class_fingerprint(
              model.numerics_class),
          'self_test': model.self_test().to_json()}),
      ('input', {
          'id': 'text', 'sha256': 'none', 'tokens': context.length,
          'tokens_sha256': hashing.tokens_sha256(context.tokens),
          'token_ids': list(context.tokens)}),
      ('artifact', {
          'id': 'context', 'artifact': made.id, 'key': made.key, 'start': 0,
          'end': context.length, 'profile': model.profile.dtype,
          'input': 'text', 'store': 'store', 'digests': digests}),
      ('logits', {
          'id': 'last', 'profile': model.profile.dtype, 'group': {},
          'rows': [context.length - 1],
          'sha256': [hashing.logits_sha256(logits)],
          'argmax': [int(logits.argmax())],
          'tokens_computed': context.length, 'tokens_restored': 0}),
      ('digest', {'id': 'state', 'group': {}, 'sha256': 'ab' * 32}),
      ('output', {'id': 'answer', 'input': 'text', 'text': '7',
                  'token_ids': [7, 8]}),
      ('score', {'id': 'right', 'rule': 'integer', 'answer': '7',
                 'expected': '7', 'group': {}, 'value': True}),
      ('end', {'status': 'done'}),
  ])


def write(
    directory: pathlib.Path, lines: list[tuple[str, dict[str, Any]]]
) -> pathlib.Path:
  """Writes a ledger of these lines; returns the directory."""
  with ledger_lib.Ledger(directory, create=True) as ledger:
    for kind, body in lines:
      ledger.append(kind, body)
  return directory


def body(lines: list[tuple[str, dict[str, Any]]], kind: str) -> dict[str, Any]:
  """Returns the body of the only line of a kind, to be changed."""
  found, = [b for k, b in lines if k == kind]
  return found
