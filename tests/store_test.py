import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib

import blake3
import numpy as np
import pytest
import tensorstore as ts

from kvgraft_jax import artifact
from kvgraft_jax import blocks
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import store as store_lib
import store_helpers

_numbers = itertools.count()


@pytest.fixture(params=['path', 'file', 'memory'])
def url(request, tmp_path):
  """A store that does not exist yet."""
  return {
      'path': str(tmp_path / 'new' / 'store'),
      'file': f'file://{tmp_path}/new/store',
      'memory': f'memory://store{next(_numbers)}',
  }[request.param]


@pytest.fixture
def store(tmp_path):
  return store_lib.Store(str(tmp_path / 'store'))


@pytest.mark.parametrize('start, end, block, sliding', [
    (0, 1, 32, 'full'),
    (0, 1, 32, 'window'),
    (0, 31, 32, 'full'),
    (0, 32, 32, 'full'),
    (0, 33, 32, 'full'),
    (0, 100, 32, 'window'),
    (5, 20, 32, 'full'),
    (37, 100, 32, 'full'),
    (37, 129, 32, 'window'),
    (63, 64, 32, 'full'),
    (500, 800, 512, 'full'),
    (500, 1100, 512, 'window'),
])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_round_trip(url, start, end, block, sliding, dtype):
  what = store_helpers.case(
      start, end, block=block, sliding=sliding, dtype=dtype)
  store = store_lib.Store(url)
  assert store.get(what.fields.key) is None
  made = store_helpers.deposit(store, what, provenance={'text': 'a book'})
  store = store_lib.Store(url, create=False)
  found = store.get(what.fields.key)
  assert found == made and found.provenance == {'text': 'a book'}
  assert store.list() == [made] and store.list_damaged() == []
  store_helpers.check(store, found, what)


@pytest.mark.parametrize('start, end', [(0, 100), (37, 100), (40, 60)])
def test_any_range_into_part_of_a_larger_cache(store, start, end):
  what = store_helpers.case(start, end)
  made = store_helpers.deposit(store, what)
  for kind, layout in what.layouts.items():
    rows = what.rows(kind)
    for lo, hi in itertools.combinations(
        sorted({start, start + 1, 64, 63, 65, end - 1, end, 50} & set(
            range(start, end + 1))), 2):
      cache = np.full((2, len(layout.layers), end + 9, 2, 16), 7, np.uint16)
      expected = cache.copy()
      expected[:, :, lo:hi] = rows[:, :, lo - start:hi - start].swapaxes(0, 1)
      for verify in (True, False):
        cache[:] = 7
        n = store.read(made, kind, lo, hi, cache[0, :, lo:hi],
                       cache[1, :, lo:hi], verify=verify)
        assert cache.tobytes() == expected.tobytes()
        blocks = artifact.blocks_of(lo, hi, 32)
        read = sum(
            min(b.number * 32 + 32, end) - max(b.number * 32, start)
            for b in blocks) if verify else hi - lo
        assert n == read * 2 * len(layout.layers) * 2 * 16 * 2


@pytest.mark.parametrize('most', [1, 5000, 20000])
def test_reads_of_any_size(store, monkeypatch, most):
  """Parts of a block, several blocks, and blocks at both edges apart."""
  what = store_helpers.case(37, 350)
  made = store_helpers.deposit(store, what)
  monkeypatch.setattr(blocks, '_READ_BYTES', most)
  store_helpers.check(store, made, what)
  for lo, hi in ((40, 340), (64, 340), (40, 320), (64, 320), (40, 42)):
    for verify in (True, False):
      found = store_helpers.read(store, made, 'global', lo, hi, verify)
      assert found.tobytes() == what.rows('global')[
          :, :, lo - 37:hi - 37].tobytes()


@pytest.mark.parametrize('kind', ['sliding', 'global'])
def test_some_layers(store, kind):
  what = store_helpers.case(37, 200)
  made = store_helpers.deposit(store, what)
  count = len(what.layouts[kind].layers)
  for layers in (slice(0, 1), slice(1, 2), slice(1, None), slice(-1, None),
                 slice(0, 99), slice(None), None):
    for verify in (True, False):
      rows = what.rows(kind)[layers or slice(None), :, 13:140]
      out = np.zeros((2, len(rows), 127, 2, 16), np.uint16)
      read = store.read(
          made, kind, 50, 177, *out, layers=layers, verify=verify)
      assert out.swapaxes(0, 1).tobytes() == rows.tobytes()
      assert read == out.nbytes + (verify * len(rows) * (13 + 15) * 128)
  out = np.zeros((2, 1, 10, 2, 16), np.uint16)
  for layers in (slice(0, 0), slice(count, None), slice(0, None, 2)):
    with pytest.raises(errors.UsageError, match='layers are'):
      store.read(made, kind, 50, 60, *out, layers=layers)
  with pytest.raises(errors.UsageError, match='output is'):
    store.read(made, kind, 50, 60, *out, layers=slice(0, 2))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_every_kind_of_bit_pattern_survives(store, dtype):
  # Every 16-bit pattern; as float32 they are the top halves of NaNs with all
  # payload bits set below.
  what = store_helpers.case(
      0, 64, dtype=dtype, heads=2, dim=256, layers=((0,), (1,)))
  patterns = np.arange(1 << 16, dtype=np.uint32)
  if dtype == 'float32':
    patterns = patterns << 16 | 0xffff
  for (kind, index), array in what.blocks.items():
    part = patterns[index * 32768:][:32768]
    what.blocks[kind, index] = part.astype(array.dtype).reshape(array.shape)
  assert np.unique(what.rows('global')).size == 1 << 16
  store_helpers.check(store, store_helpers.deposit(store, what), what)


@pytest.mark.parametrize('fill', [0, 0x8000])
def test_blocks_of_zeros_are_stored(store, tmp_path, fill):
  what = store_helpers.case(fill=fill)
  made = store_helpers.deposit(store, what)
  store_helpers.check(store, made, what)
  for path in store_helpers.files(tmp_path / 'store', made).values():
    assert path.exists()


@pytest.mark.parametrize('start, end, block', [
    (0, 1, 32), (37, 100, 32), (0, 700, 512), (500, 1600, 512)])
def test_data_files_have_the_stated_sizes_and_no_others_are_left(
    store, tmp_path, start, end, block):
  made = store_helpers.deposit(
      store, store_helpers.case(start, end, block=block))
  base = tmp_path / 'store' / 'a' / made.key / made.attempt
  found = {str(p.relative_to(base)): p.stat().st_size
           for p in base.rglob('*') if p.is_file() and p.name != 'zarr.json'}
  assert found == artifact.data_files(made.fields, made.layouts)
  assert made.nbytes == sum(found.values())


def test_another_zarr_reader_sees_the_same_bits(store, tmp_path):
  what = store_helpers.case(37, 100)
  made = store_helpers.deposit(store, what)
  path = tmp_path / 'store' / 'a' / made.key / made.attempt / 'global'
  array = ts.open({
      'driver': 'zarr3', 'kvstore': {'driver': 'file', 'path': str(path)},
  }).result()
  first = array.spec().to_json()['metadata']['attributes']['first_position']
  found = array[:, :, 37 - first:].read().result()
  np.testing.assert_array_equal(found, what.rows('global'))


def _framed(hasher, tag: str, *parts: bytes) -> str:
  for part in (tag.encode(), *parts):
    hasher.update(len(part).to_bytes(8, 'little') + part)
  return hasher.hexdigest()


@pytest.mark.parametrize('start, end, block, sliding', [
    (0, 3, 32, 'full'), (37, 100, 32, 'window'), (500, 1100, 512, 'full')])
def test_reader_written_from_the_format_alone(
    store, tmp_path, start, end, block, sliding):
  """Reads files, hashes and shards by FORMAT.md, without this package."""
  what = store_helpers.case(start, end, block=block, sliding=sliding)
  store_helpers.deposit(store, what)
  [base] = (tmp_path / 'store' / 'a').iterdir()
  line, body = (base / 'manifest.json').read_bytes().split(b'\n', 1)
  assert line.decode() == hashlib.sha256(body).hexdigest()
  value = json.loads(body)
  content, outer = value['content'], value['outer']
  fields = content['fields']
  canonical = functools.partial(
      json.dumps, sort_keys=True, ensure_ascii=False, separators=(',', ':'))
  for tag, part, expected in (('kvgraft.key', fields, base.name),
                              ('kvgraft.content', content, value['id'])):
    assert _framed(hashlib.sha256(), tag, canonical(part).encode()) == expected
  tokens = (base / outer['attempt'] / 'tokens').read_bytes()
  assert _framed(hashlib.sha256(), 'kvgraft.tokens', tokens) == (
      fields['tokens_sha256'])
  for kind, layout in content['layouts'].items():
    first = start
    if sliding == 'window' and layout['window'] is not None:
      first = max(start, (end - layout['window'] - 1) // block * block)
    numbers = range(first // block, (end - 1) // block + 1)
    origin, rows = numbers[0] * block, block
    inner = 256 if block % 256 == 0 else block
    if len(numbers) == 1:
      origin, rows, inner = first, end - first, end - first
    layers, heads = layout['layers'], layout['kv_heads']
    dim = layout['head_dim']
    for i, number in enumerate(numbers):
      file = (base / outer['attempt'] / kind / f'c.0.0.{i}.0.0').read_bytes()
      grid = (len(layers), 2, rows // inner, heads)
      index = np.frombuffer(file[-4 - 16 * math.prod(grid):-4], '<u8').reshape(
          *grid, 2)
      found = np.zeros((len(layers), 2, rows, heads, dim), '<u2')
      for at in np.ndindex(*grid):
        offset, length = (int(n) for n in index[at])
        if offset != 2**64 - 1:
          found[at[0], at[1], at[2] * inner:(at[2] + 1) * inner, at[3]] = (
              np.frombuffer(file[offset:offset + length], '<u2').reshape(
                  inner, dim))
      lo, hi = max(first, number * block), min(end, (number + 1) * block)
      base_row = origin + i * rows
      found = found[:, :, lo - base_row:hi - base_row]
      assert found.tobytes() == what.blocks[kind, number].tobytes()
      digests = [
          _framed(blake3.blake3(), 'kvgraft.block',
                  f'{kind} {layer} {part} {lo} {hi}'.encode(),
                  found[n, p].tobytes())
          for n, layer in enumerate(layers) for p, part in enumerate('KV')]
      assert content['blocks'][kind][i] == digests


def test_source_may_be_reused_once_written(store):
  what = store_helpers.case()
  scratch = {}
  with store.create(what.fields, what.layouts, what.tokens) as writer:
    for (kind, index), array in what.blocks.items():
      buffer = scratch.setdefault(array.shape, np.empty_like(array))
      buffer[:] = array
      writer.write_block(kind, index, buffer)
      buffer[:] = 0
    made = writer.commit(last_logits_sha256='0' * 64, outer={})
  store_helpers.check(store, made, what)


def test_strided_source(store):
  what = store_helpers.case()
  with store.create(what.fields, what.layouts, what.tokens) as writer:
    for (kind, index), array in what.blocks.items():
      apart = np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)
      writer.write_block(kind, index, apart)
    made = writer.commit(last_logits_sha256='0' * 64, outer={})
  store_helpers.check(store, made, what)


def test_id_depends_neither_on_order_nor_on_store(store, url):
  what = store_helpers.case()
  one = store_helpers.deposit(store, what)
  what.blocks = dict(reversed(what.blocks.items()))
  two = store_helpers.deposit(store_lib.Store(url), what)
  assert one.id == two.id and one.attempt != two.attempt


def test_second_deposit_returns_the_first_and_leaves_nothing(store, tmp_path):
  what = store_helpers.case()
  one = store_helpers.deposit(store, what)
  assert store_helpers.deposit(store, what) == one
  base = tmp_path / 'store' / 'a' / one.key
  assert sorted(p.name for p in base.iterdir()) == sorted(
      [one.attempt, 'manifest.json'])
  store_helpers.check(store, one, what)


def test_other_content_under_one_key_is_a_conflict(store, tmp_path):
  what = store_helpers.case()
  one = store_helpers.deposit(store, what)
  other = store_helpers.case()
  other.blocks['global', 1][1, 1, 3, 0, 5] ^= 1
  with pytest.raises(errors.ConflictError, match=r'global layer 4 V block 1 '):
    store_helpers.deposit(store, other)
  with pytest.raises(errors.ConflictError, match='the last logits'):
    store_helpers.deposit(store, what, logits='cd' * 32)
  base = tmp_path / 'store' / 'a' / one.key
  assert len(list(base.iterdir())) == 2
  store_helpers.check(store, store.get(one.key), what)


def test_abandoned_deposit_is_removed(url):
  what = store_helpers.case()
  store = store_lib.Store(url)
  with pytest.raises(RuntimeError, match='mine'):
    with store.create(what.fields, what.layouts, what.tokens) as writer:
      writer.write_block('global', 0, what.blocks['global', 0])
      raise RuntimeError('mine')
  with store.create(what.fields, what.layouts, what.tokens) as writer:
    writer.write_block('global', 0, what.blocks['global', 0])
  assert store.list() == []
  assert store._kv.list('a/') == []
  store_helpers.check(store, store_helpers.deposit(store, what), what)


def test_attempt_of_an_artifact_is_not_deleted(store):
  what = store_helpers.case()
  made = store_helpers.deposit(store, what)
  with pytest.raises(errors.UsageError, match='belongs to'):
    store.delete_attempt(made.key, made.attempt)
  with pytest.raises(errors.UsageError, match='name no attempt'):
    store.delete_attempt(made.key, '../' + made.attempt)
  store.delete_attempt(made.key, 'e' * 32)
  store_helpers.check(store, made, what)


def test_find(url):
  store = store_lib.Store(url)
  made = [store_helpers.deposit(store, store_helpers.case(end=40, seed=i))
          for i in range(3)]
  store.set_name('book', made[1].id)
  store.set_name('book', made[1].id)
  store.set_name('v1.0_final-B', made[2])
  assert store.names() == {'book': made[1].id, 'v1.0_final-B': made[2].id}
  assert store.find('book') == made[1]
  assert store.find('v1.0_final-B') == made[2]
  for one in made:
    for ref in (one.id, one.id[:10], one.id[:10].upper(), one.key):
      assert store.find(ref) == one
  assert {m.key for m in store.list()} == {m.key for m in made}


def test_ambiguous_prefix_lists_the_candidates(store, tmp_path):
  # Two artifacts whose ids share four digits, by choice of the logits' hash.
  cases = [store_helpers.case(end=4, seed=i) for i in range(2)]
  made = [store_helpers.deposit(store, what) for what in cases]
  ids = [{}, {}]
  for one, known in zip(made, ids):
    for logits in (hashing.sha256('test', bytes([i // 256, i % 256]))
                   for i in range(1000)):
      changed = dataclasses.replace(one, last_logits_sha256=logits)
      known[changed.id[:4]] = logits
  prefix = min(set(ids[0]) & set(ids[1]))
  store = store_lib.Store(str(tmp_path / 'other'))
  made = [store_helpers.deposit(store, what, known[prefix])
          for what, known in zip(cases, ids)]
  with pytest.raises(errors.UsageError, match='2 artifacts') as caught:
    store.find(prefix)
  for one in made:
    assert one.id[:12] in str(caught.value)
    assert store.find(one.id[:12]) == one


@pytest.mark.parametrize('ref', ['nope', 'bok', 'abcd', 'f' * 64])
def test_unknown_reference(store, ref):
  made = store_helpers.deposit(store, store_helpers.case(end=4))
  store.set_name('book', made)
  with pytest.raises(errors.NotFoundError, match='kvgraft ls') as caught:
    store.find(ref)
  assert '\n' not in str(caught.value)
  assert ('did you mean book?' in str(caught.value)) == (ref == 'bok')


@pytest.mark.parametrize('ref', [
    '', '.', '..', '../x', 'a/b', 'a\\b', '/etc/passwd', 'x\0y', 'a' * 300,
    'a..b', '-rf', '.hidden', 'ü', 'a b', 'x\n', 'x.__lock', None, 7])
def test_odd_references_are_refused(store, tmp_path, ref):
  made = store_helpers.deposit(store, store_helpers.case(end=4))
  for act in (store.find, lambda r: store.set_name(r, made)):
    with pytest.raises(errors.UsageError, match='is no reference'):
      act(ref)
  assert not (tmp_path / 'store' / 'names').exists()


@pytest.mark.parametrize('name', ['beef', '2024', 'f' * 64])
def test_name_that_looks_like_an_id_is_refused(store, name):
  made = store_helpers.deposit(store, store_helpers.case(end=4))
  with pytest.raises(errors.UsageError, match='mistaken for an id'):
    store.set_name(name, made)


def test_name_is_never_moved(url):
  store = store_lib.Store(url)
  one, two = (store_helpers.deposit(store, store_helpers.case(end=4, seed=i))
              for i in range(2))
  store.set_name('book', one)
  with pytest.raises(errors.UsageError, match=f'taken by.*{one.id[:12]}') as e:
    store.set_name('book', two)
  assert e.value.exit_code == 2
  assert store.find('book') == one


@pytest.mark.parametrize('url, message', [
    ('', 'expected a path'), ('x\0y', 'expected a path'), (None, 'expected'),
    ('foo://x', 'foo'), ('http://host/x', 'http'),
    ('file://host/x', 'authority'), ('{"driver":"nope"}', 'nope'),
    ('{', 'cannot'),
    ('s3://', 'cannot'), ('gs://a/', 'cannot be opened|bucket')])
def test_bad_url(url, message):
  with pytest.raises(errors.UsageError, match=message) as caught:
    store_lib.Store(url)
  assert '\n' not in str(caught.value)


def test_store_that_is_missing_or_no_directory(tmp_path):
  with pytest.raises(errors.NotFoundError, match='there is no store'):
    store_lib.Store(str(tmp_path / 'no'), create=False)
  assert not (tmp_path / 'no').exists()
  store = store_lib.Store(str(tmp_path / 'no'))
  assert store.list() == [] and store.names() == {}
  with pytest.raises(errors.NotFoundError, match='0 artifacts'):
    store.find('book')
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UsageError, match='is a file'):
    store_lib.Store(str(tmp_path / 'file'))


def test_relative_path_and_home(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  made = store_helpers.deposit(
      store_lib.Store('here'), store_helpers.case(end=4))
  assert pathlib.Path('here/a', made.key, 'manifest.json').exists()
  assert store_lib.Store('~/here').list() == [made]
  os.chdir('/')
  assert store_lib.Store(f'{tmp_path}/here/').list() == [made]


def test_read_refuses_what_does_not_fit(store):
  what = store_helpers.case(0, 100, sliding='window')
  made = store_helpers.deposit(store, what)
  good = np.zeros((2, 10, 2, 16), np.uint16)
  frozen = good.copy()
  frozen.flags.writeable = False
  for bad in (good[:1], good[:, :9], good.astype(np.int16), frozen,
              np.zeros((2, 10, 16, 2), np.uint16).swapaxes(2, 3),
              np.zeros((2, 20, 2, 16), np.uint16)[:, ::2]):
    for outs in ((good, bad), (bad, good)):
      with pytest.raises(errors.UsageError, match='output is'):
        store.read(made, 'global', 0, 10, *outs)
  for start, stop in ((-1, 9), (91, 101), (10, 10), (20, 10)):
    with pytest.raises(errors.UsageError, match=r'available are \[0, 100\)'):
      store.read(made, 'global', start, stop, good, good)
  with pytest.raises(errors.UsageError, match=r'available are \[64, 100\)'):
    store.read(made, 'sliding', 60, 70, good, good)
  with pytest.raises(errors.UsageError, match='no ring layers'):
    store.read(made, 'ring', 0, 10, good, good)


def test_writer_refuses_what_does_not_fit(store):
  what = store_helpers.case()
  block = what.blocks['global', 0]
  with store.create(what.fields, what.layouts, what.tokens) as writer:
    writer.write_block('global', 0, block)
    for args, message in (
        (('global', 0, block), 'already written'),
        (('global', 4, block), 'expected 0 to 3'),
        (('global', -1, block), 'expected 0 to 3'),
        (('ring', 0, block), 'no .ring. layers'),
        (('global', 1, block[:, :, :3]), 'expected uint16'),
        (('global', 3, block), 'expected uint16'),
        (('global', 1, block.view(np.int16)), 'expected uint16'),
    ):
      with pytest.raises(errors.UsageError, match=message):
        writer.write_block(*args)
    with pytest.raises(errors.UsageError, match='block 0 is not written'):
      writer.commit(last_logits_sha256='0' * 64, outer={})
  for tokens in (what.tokens[:-1], what.tokens + 1,
                 what.tokens.astype(np.float32)):
    with pytest.raises(errors.UsageError, match='tokens'):
      store.create(what.fields, what.layouts, tokens)


@pytest.mark.parametrize('outer, message', [
    ({'note': 'x'}, 'note'), ({'provenance': {'x': 0.5}}, 'provenance.x'),
    ({'profile': 'x'}, 'profile')])
def test_bad_outer_section(store, outer, message):
  with pytest.raises(errors.UsageError, match=message):
    store_helpers.deposit(store, store_helpers.case(end=4), **outer)
  assert store.list() == []


def test_tokens_are_int32(store):
  made = store_helpers.deposit(store, store_helpers.case(end=4))
  found = store.tokens(made)
  assert found.dtype == np.int32 and found.flags.writeable
  assert hashing.tokens_sha256(found) == made.fields.tokens_sha256
