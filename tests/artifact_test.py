import dataclasses
import hashlib
import json

import numpy as np
import pytest

from kvgraft_jax import artifact
from kvgraft_jax import errors
from kvgraft_jax import hashing
import store_helpers

# Other values mean another artifact format.
KEY = '4fd9ae48e2c86803081782fdbc6fe8319bc75d1d58642921ef36feb9d9c6fac5'
ID = '96abc1ee569556b73307bcc06c27dc853c301e3ace74107b5ea37d725b9a3697'


def manifest(**kwargs) -> artifact.Manifest:
  """Returns the manifest of a case, made without a store."""
  what = store_helpers.case(**kwargs)
  digests = {}
  for kind, layout in what.layouts.items():
    blocks = []
    for index, start, stop in artifact.geometry(what.fields, layout).blocks:
      rows = what.blocks[kind, index]
      blocks.append(tuple(
          artifact.block_digest(kind, layer, part, start, stop, rows[i, p])
          for i, layer in enumerate(layout.layers)
          for p, part in enumerate(artifact.PARTS)))
    digests[kind] = tuple(blocks)
  return artifact.Manifest(
      fields=what.fields, layouts=what.layouts, digests=digests,
      last_logits_sha256='0' * 64, attempt='1' * 32, created='2026-01-01',
      provenance={'text': 'ü', 'n': 3}, self_test={}, profile={})


@pytest.mark.parametrize(
    'start, end, block, expected',
    [
        (0, 1, 4, [(0, 0, 1)]),
        (0, 4, 4, [(0, 0, 4)]),
        (0, 5, 4, [(0, 0, 4), (1, 4, 5)]),
        (3, 5, 4, [(0, 3, 4), (1, 4, 5)]),
        (4, 8, 4, [(1, 4, 8)]),
        (5, 14, 4, [(1, 5, 8), (2, 8, 12), (3, 12, 14)]),
    ],
)
def test_blocks_are_numbered_absolutely(start, end, block, expected):
  assert artifact.blocks_of(start, end, block) == expected


@pytest.mark.parametrize(
    'start, end, expected',
    [(0, 10, 0), (0, 25, 0), (0, 56, 0), (0, 57, 32), (0, 100, 64),
     (70, 100, 70), (33, 100, 64), (64, 89, 64)],
)
def test_window_mode_begins_at_a_block(start, end, expected):
  # Window 24, block 32: a continuation at `end` sees end - 24 and later, one
  # that computes end - 1 again sees end - 24 as well.
  assert artifact.sliding_start(start, end, 32, 24) == expected
  assert expected <= max(start, end - 25)


def test_key_and_id_are_pinned():
  made = manifest(fill=7)
  made = dataclasses.replace(made, fields=dataclasses.replace(
      made.fields, tokens_sha256='c' * 64))
  assert made.key == KEY
  assert made.id == ID


def test_every_key_field_changes_the_key():
  fields = manifest(start=32).fields
  others = dict(
      model='x', tokenizer='x', template='x', numerics_class='x',
      parent='b' * 64, start=33, end=99, tokens_sha256='c' * 64, block=64,
      sliding='window')
  assert set(others) == {
      f.name for f in dataclasses.fields(fields)} - {'format'}
  keys = {dataclasses.replace(fields, **{k: v}).key for k, v in others.items()}
  assert len(keys | {fields.key}) == len(others) + 1


@pytest.mark.parametrize(
    'change, message',
    [
        ({'start': -1}, 'positions'),
        ({'end': 0}, 'positions'),
        ({'end': True}, 'positions'),
        ({'start': 5}, 'parent'),
        ({'parent': 'a' * 64}, 'parent'),
        ({'tokens_sha256': 'A' * 64}, 'tokens_sha256'),
        ({'block': 0}, 'block'),
        ({'sliding': 'ring'}, 'sliding'),
        ({'model': ''}, 'model'),
        ({'format': 2}, 'format'),
    ],
)
def test_bad_key_fields_are_named(change, message):
  with pytest.raises(errors.UsageError, match=message):
    dataclasses.replace(manifest().fields, **change)


def test_digest_covers_its_place_and_every_byte():
  rows = np.arange(2 * 3 * 4, dtype=np.uint16).reshape(2, 3, 4)
  base = ('sliding', 1, 'K', 0, 2, rows)
  seen = {artifact.block_digest(*base)}
  for i, other in enumerate(('global', 2, 'V', 1, 3)):
    seen.add(artifact.block_digest(*base[:i], other, *base[i + 1:]))
  for i in range(rows.nbytes):
    flipped = rows.copy()
    flipped.view(np.uint8).reshape(-1)[i] ^= 1
    seen.add(artifact.block_digest(*base[:5], flipped))
  assert len(seen) == 1 + 5 + rows.nbytes


@pytest.mark.parametrize(
    'start, end, shape, sizes',
    [
        # One block: no padding, wherever it begins.
        (0, 1, (0, 1, 1, 1), [1]),
        (700, 720, (700, 20, 20, 20), [20]),
        (0, 512, (0, 512, 512, 512), [512]),
        # Several: whole data files, inner chunks of 256 rows.
        (0, 700, (0, 700, 512, 256), [512, 256]),
        (500, 800, (0, 800, 512, 256), [256, 512]),
        (1000, 1100, (512, 588, 512, 256), [256, 256]),
    ],
)
def test_short_artifacts_are_not_padded(start, end, shape, sizes):
  what = store_helpers.case(start, end, block=512)
  found = artifact.geometry(what.fields, what.layouts['global'])
  assert (found.origin, found.rows, found.shard, found.inner) == shape
  index = 16 * 2 * 2 * 2 * (found.shard // found.inner) + 4
  for i, rows in enumerate(sizes):
    assert artifact.data_files(what.fields, what.layouts)[
        f'global/c.0.0.{i}.0.0'] == rows * 2 * 2 * 2 * 16 * 2 + index


@pytest.mark.parametrize('sliding', ['full', 'window'])
@pytest.mark.parametrize('start, end', [(0, 1), (0, 100), (37, 101)])
def test_manifest_round_trip(start, end, sliding):
  made = manifest(start=start, end=end, sliding=sliding)
  found = artifact.Manifest.from_bytes(made.to_bytes())
  assert found == made
  assert (found.key, found.id) == (made.key, made.id)
  first = artifact.sliding_start(start, end, 32, 24)
  assert artifact.available(found) == {
      'sliding': (first if sliding == 'window' else start, end),
      'global': (start, end)}


def test_id_covers_the_content_and_nothing_else():
  made = manifest()
  assert dataclasses.replace(
      made, attempt='2' * 32, created='x', provenance={}, profile={'a': 1},
      self_test={'b': 'c'}).id == made.id
  assert dataclasses.replace(made, last_logits_sha256='1' * 64).id != made.id


def test_first_difference_names_the_block():
  made = manifest()
  blocks = [list(b) for b in made.digests['sliding']]
  blocks[2][3] = 'f' * 64
  other = dataclasses.replace(made, digests=dict(
      made.digests, sliding=tuple(map(tuple, blocks))))
  assert artifact.first_difference(made, other) == (
      'sliding layer 1 V block 2 (positions 64 to 95)')
  other = dataclasses.replace(made, last_logits_sha256='1' * 64)
  assert artifact.first_difference(made, other) == 'the last logits'
  assert artifact.first_difference(made, made) == ''


def test_floats_have_no_place_in_a_manifest():
  with pytest.raises(TypeError, match='provenance.x'):
    dataclasses.replace(manifest(), provenance={'x': 0.5}).to_bytes()


def test_every_flipped_bit_is_damage():
  data = manifest(end=20).to_bytes()
  for i in range(len(data)):
    flipped = bytearray(data)
    flipped[i] ^= 1 << i % 8
    with pytest.raises(errors.DamageError, match='here: line 1'):
      artifact.Manifest.from_bytes(bytes(flipped), 'here')


@pytest.mark.parametrize('size', [0, 1, 64, 65, 66, -1])
def test_truncated_manifest_is_damage(size):
  with pytest.raises(errors.DamageError):
    artifact.Manifest.from_bytes(manifest().to_bytes()[:size])


def _resigned(edit, rehash: bool) -> bytes:
  """Returns an edited manifest whose line 1, and id if asked, are right."""
  value = json.loads(manifest().to_bytes().split(b'\n', 1)[1])
  edit(value)
  if rehash:
    value['id'] = hashing.json_sha256('kvgraft.content', value['content'])
  return artifact.sign(json.dumps(
      value, sort_keys=True, ensure_ascii=False,
      separators=(',', ':')).encode())


def _set(*path):
  """Returns an edit that sets the item at `path[:-1]` to its last part."""
  def edit(value):
    for name in path[:-2]:
      value = value[name]
    value[path[-2]] = path[-1]
  return edit


def _drop(*path):
  def edit(value):
    for name in path[:-1]:
      value = value[name]
    del value[path[-1]]
  return edit


_EDITS = [
    (_set('content', 'fields', 'end', 99), 'content hashes'),
    (_set('content', 'blocks', 'sliding', 0, 0, 'f' * 64), 'content hashes'),
    (_set('content', 'last_logits_sha256', 'f' * 64), 'content hashes'),
    (_set('id', 'f' * 64), 'content hashes'),
    (_set('id', 7), 'content hashes'),
    (_drop('id'), 'content hashes'),
    (_drop('content'), 'content'),
    (_drop('outer'), 'outer'),
]
# Right id as well: only the rules of the format are left to tell.
_REHASHED_EDITS = [
    (_set('content', 'fields', 'end', 10**12), 'positions'),
    (_set('content', 'fields', 'end', 200), 'digests of 4 blocks, expected 7'),
    (_set('content', 'fields', 'start', 'x'), 'positions'),
    (_set('content', 'fields', 'extra', 1), 'extra'),
    (_drop('content', 'fields', 'parent'), 'parent'),
    (_set('content', 'fields', 'format', 2), 'format'),
    (_set('content', 'layouts', 'sliding', 'layers', [1, 0, 3]), 'ascending'),
    (_set('content', 'layouts', 'sliding', 'layers', [0, 1]), 'has 6 digests'),
    (_set('content', 'layouts', 'sliding', 'layers', [0, 1, 3, 5]),
     'has 6 digests'),
    (_set('content', 'layouts', 'sliding', 'layers', [0, 1, 2]), 'two kinds'),
    (_set('content', 'layouts', 'sliding', 'layers', 7), 'malformed'),
    (_set('content', 'layouts', 'sliding', 'window', None), 'window'),
    (_set('content', 'layouts', 'sliding', 'kv_heads', 0), 'heads'),
    (_set('content', 'layouts', 'sliding', 'dtype', 'int8'), 'dtype'),
    (_set('content', 'layouts', 'ring', {}), 'malformed'),
    (_drop('content', 'layouts', 'global'), "digests are of"),
    (_drop('content', 'blocks', 'global'), "digests are of"),
    (_drop('content', 'blocks', 'sliding', 1), 'digests of 3 blocks'),
    (_drop('content', 'blocks', 'sliding', 1, 0), 'has 5 digests'),
    (_set('content', 'blocks', 'sliding', 1, 0, 5), 'not 64'),
    (_set('content', 'blocks', []), 'malformed'),
    (_set('content', 'extra', 1), 'content hashes'),
    (_set('extra', 1), 'do not follow'),
    (_set('outer', 'extra', 1), 'do not follow'),
    (_drop('outer', 'zarr'), 'do not follow'),
    (_set('outer', 'zarr', 'global', 'shape', [1, 2, 3, 4, 5]),
     'do not follow'),
    (_set('outer', 'files', 'tokens', 1), 'do not follow'),
    (_set('outer', 'attempt', '../../../../etc'), 'attempt'),
    (_set('outer', 'provenance', 'x', 1.5), 'x'),
    (_set('outer', 'profile', []), 'profile'),
]


@pytest.mark.parametrize('rehash, edit, message', [
    *((False, *e) for e in _EDITS), *((True, *e) for e in _REHASHED_EDITS)])
def test_hand_edited_manifest_is_refused_in_one_line(rehash, edit, message):
  with pytest.raises(errors.DamageError, match=message) as caught:
    artifact.Manifest.from_bytes(_resigned(edit, rehash), 'here')
  text = str(caught.value)
  assert text.startswith('here: ') and '\n' not in text and len(text) < 400


def test_unknown_kind_is_named():
  def rename(value):
    for part in ('blocks', 'layouts'):
      section = value['content'][part]
      section['chunked'] = section.pop('sliding')
  with pytest.raises(errors.DamageError, match="kind is 'chunked'"):
    artifact.Manifest.from_bytes(_resigned(rename, True))


@pytest.mark.parametrize('version', [0, 2, '1', None, True, 1.0])
def test_other_format_version_is_refused(version):
  with pytest.raises(errors.IncompatibleError, match='upgrade') as caught:
    artifact.Manifest.from_bytes(_resigned(_set('format', version), False))
  assert caught.value.factor == 'format'


@pytest.mark.parametrize('body', [
    b'', b'[]', b'7', b'"x"', b'{', b'\xff', b'[' * 100_000, b'{"a":NaN}'])
def test_signed_nonsense_is_refused(body):
  data = hashlib.sha256(body).hexdigest().encode() + b'\n' + body
  with pytest.raises((errors.DamageError, errors.IncompatibleError)):
    artifact.Manifest.from_bytes(data)


def test_only_the_canonical_form_is_read():
  line, body = manifest().to_bytes().split(b'\n', 1)
  del line
  with pytest.raises(errors.DamageError, match='do not follow'):
    artifact.Manifest.from_bytes(artifact.sign(body + b'\n'))
