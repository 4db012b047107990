"""Artifacts as pure values: keys, block digests, manifests, array geometry.

An artifact holds K and V of positions [start, end) in blocks of Q positions.
Its key is known before anything is computed; its id covers every stored byte.
FORMAT.md describes the same in words.
"""

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
import json
import re
from typing import Any
from typing import NamedTuple

import numpy as np

from kvgraft_jax import config
from kvgraft_jax import errors
from kvgraft_jax import hashing

FORMAT = 1
BLOCK = 512
FULL = 'full'
WINDOW = 'window'
PARTS = ('K', 'V')
ELEMENT_TYPES = {'bfloat16': 'uint16', 'float32': 'uint32'}

# Rows of an inner chunk in artifacts of several blocks: the padding at both
# ends stays below this many positions.
_INNER_ROWS = 256
_MAX_POSITION = 2**31 - 1
_HEX64 = re.compile(r'[0-9a-f]{64}')
_ATTEMPT = re.compile(r'[0-9a-f]{32}')
_OUTER = ('attempt', 'created', 'profile', 'provenance', 'self_test')


class Block(NamedTuple):
  """Valid positions [start, stop) of block `number`."""

  number: int
  start: int
  stop: int


def blocks_of(start: int, end: int, block: int) -> list[Block]:
  """Returns the blocks that positions [start, end) touch, ascending."""
  return [
      Block(i, max(start, i * block), min(end, (i + 1) * block))
      for i in range(start // block, -(-end // block))
  ]


def sliding_start(start: int, end: int, block: int, window: int) -> int:
  """Returns the first sliding position that sliding mode 'window' stores.

  That is end - window - 1, rounded down to a block and clamped to `start`.
  """
  return max(start, (end - window - 1) // block * block)


def is_hash(text: Any) -> bool:
  """Tells whether `text` is 64 lower-case hexadecimal digits."""
  return isinstance(text, str) and _HEX64.fullmatch(text) is not None


def is_attempt(text: Any) -> bool:
  """Tells whether `text` is the name of one writer's directory."""
  return isinstance(text, str) and _ATTEMPT.fullmatch(text) is not None


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise errors.UsageError(message)


def _is_int(value: Any, low: int, high: int) -> bool:
  return type(value) is int and low <= value <= high


def _is_text(value: Any) -> bool:
  return (isinstance(value, str) and 0 < len(value) <= 256
          and value.isprintable())


@dataclasses.dataclass(frozen=True)
class KeyFields:
  """Everything that fixes an artifact's content, known before computing it.

  Attributes:
    model: fingerprint of the weights and the config.
    tokenizer: fingerprint of the tokenizer, or 'none'.
    template: fingerprint of the chat template, or 'none'.
    numerics_class: the class within which bits may be compared.
    parent: key of the artifact in front, '' when start is 0.
    start: first position.
    end: one past the last position.
    tokens_sha256: `hashing.tokens_sha256` of the token ids of [start, end).
    block: positions of a block, Q.
    sliding: 'full', or 'window' for only what a continuation at end can see.
    format: version of the artifact format.
  """

  model: str
  tokenizer: str
  template: str
  numerics_class: str
  parent: str
  start: int
  end: int
  tokens_sha256: str
  block: int = BLOCK
  sliding: str = FULL
  format: int = FORMAT

  def __post_init__(self):
    _require(self.format == FORMAT and type(self.format) is int,
             f'format is {self.format!r}, expected {FORMAT}')
    for name in ('model', 'tokenizer', 'template', 'numerics_class'):
      _require(_is_text(getattr(self, name)),
               f'{name} is {getattr(self, name)!r:.80}, expected a short'
               ' non-empty string')
    _require(is_hash(self.tokens_sha256),
             f'tokens_sha256 is {self.tokens_sha256!r:.80}, expected 64 hex'
             ' digits')
    _require(_is_int(self.start, 0, _MAX_POSITION)
             and _is_int(self.end, 1, _MAX_POSITION) and self.start < self.end,
             f'positions are [{self.start!r:.20}, {self.end!r:.20}), expected'
             f' integers 0 <= start < end <= {_MAX_POSITION}')
    _require(_is_int(self.block, 1, 2**20),
             f'block is {self.block!r:.20}, expected an integer from 1 to'
             f' {2**20}')
    _require(self.sliding in (FULL, WINDOW),
             f'sliding is {self.sliding!r:.80}, expected {FULL!r} or'
             f' {WINDOW!r}')
    if self.start:
      _require(is_hash(self.parent),
               f'start is {self.start} but parent is {self.parent!r:.80},'
               ' expected the key of the artifact in front')
    else:
      _require(self.parent == '', 'start is 0 but there is a parent')

  def to_json(self) -> dict[str, Any]:
    """Returns the canonical-JSON form."""
    return dataclasses.asdict(self)

  @functools.cached_property
  def key(self) -> str:
    """The hex SHA-256 that names the artifact's directory."""
    return hashing.json_sha256('kvgraft.key', self.to_json())


@dataclasses.dataclass(frozen=True)
class KindLayout:
  """What the stored layers of one attention kind share.

  Attributes:
    layers: their numbers in the model, ascending; the array's axis 0.
    kv_heads: key/value heads.
    head_dim: elements of a head.
    dtype: 'bfloat16' or 'float32'; stored as bit patterns.
    window: positions a query sees; None for the global kind.
  """

  layers: tuple[int, ...]
  kv_heads: int
  head_dim: int
  dtype: str
  window: int | None

  def __post_init__(self):
    _require(isinstance(self.layers, tuple) and len(self.layers) > 0
             and all(_is_int(n, 0, 99999) for n in self.layers)
             and all(a < b for a, b in zip(self.layers, self.layers[1:])),
             f'layers are {self.layers!r:.80}, expected ascending layer'
             ' numbers')
    _require(_is_int(self.kv_heads, 1, 2**16)
             and _is_int(self.head_dim, 1, 2**16),
             f'heads are {self.kv_heads!r:.20} x {self.head_dim!r:.20},'
             ' expected positive integers')
    _require(isinstance(self.dtype, str) and self.dtype in ELEMENT_TYPES,
             f'dtype is {self.dtype!r:.80}, expected one of'
             f' {sorted(ELEMENT_TYPES)}')
    _require(self.window is None or _is_int(self.window, 1, _MAX_POSITION),
             f'window is {self.window!r:.20}, expected a positive integer or'
             ' null')

  @property
  def element(self) -> np.dtype:
    """The unsigned integer type that holds one bit pattern."""
    return np.dtype(ELEMENT_TYPES[self.dtype])

  def to_json(self) -> dict[str, Any]:
    """Returns the canonical-JSON form."""
    return dict(dataclasses.asdict(self), layers=list(self.layers))


@dataclasses.dataclass(frozen=True)
class Geometry:
  """Where the positions of one kind lie in its array [L, 2, T, K, H].

  Attributes:
    blocks: the stored blocks, ascending.
    origin: position at index 0 of axis 2.
    rows: T.
    shard: rows of a data file.
    inner: rows of an inner chunk.
  """

  blocks: tuple[Block, ...]
  origin: int
  rows: int
  shard: int
  inner: int

  @property
  def start(self) -> int:
    """First stored position."""
    return self.blocks[0].start

  @property
  def end(self) -> int:
    """One past the last stored position."""
    return self.blocks[-1].stop


def stored_range(
    fields: KeyFields, layout: KindLayout
) -> tuple[int, int]:
  """Returns the positions [first, end) that are stored of a kind."""
  start = fields.start
  if fields.sliding == WINDOW and layout.window is not None:
    start = sliding_start(start, fields.end, fields.block, layout.window)
  return start, fields.end


def geometry(fields: KeyFields, layout: KindLayout) -> Geometry:
  """Returns the array geometry of one kind.

  Within one block the array begins at the first stored position and is one
  inner chunk long, so that short artifacts are not padded.
  """
  start, end = stored_range(fields, layout)
  block = fields.block
  blocks = tuple(blocks_of(start, end, block))
  if len(blocks) == 1:
    return Geometry(blocks, start, end - start, end - start, end - start)
  origin = blocks[0].number * block
  inner = _INNER_ROWS if block % _INNER_ROWS == 0 else block
  return Geometry(blocks, origin, end - origin, block, inner)


def zarr_metadata(fields: KeyFields, layout: KindLayout) -> dict[str, Any]:
  """Returns the zarr.json of one kind's array."""
  shape = geometry(fields, layout)
  layers, heads, dim = len(layout.layers), layout.kv_heads, layout.head_dim
  shard = [layers, 2, shape.shard, heads, dim]
  little = {'name': 'bytes', 'configuration': {'endian': 'little'}}
  return {
      'zarr_format': 3,
      'node_type': 'array',
      'shape': [layers, 2, shape.rows, heads, dim],
      'data_type': ELEMENT_TYPES[layout.dtype],
      'chunk_grid': {
          'name': 'regular',
          'configuration': {'chunk_shape': shard},
      },
      # '.' keeps the data files of a kind in one directory.
      'chunk_key_encoding': {
          'name': 'default', 'configuration': {'separator': '.'},
      },
      'fill_value': 0,
      'attributes': {'first_position': shape.origin},
      'codecs': [{
          'name': 'sharding_indexed',
          'configuration': {
              'chunk_shape': [1, 1, shape.inner, 1, dim],
              'codecs': [little],
              'index_codecs': [little, {'name': 'crc32c'}],
              'index_location': 'end',
          },
      }],
  }


def data_files(
    fields: KeyFields, layouts: Mapping[str, KindLayout]
) -> dict[str, int]:
  """Returns data file in the attempt directory -> its size in bytes."""
  files = {'tokens': 4 * (fields.end - fields.start)}
  for kind, layout in layouts.items():
    shape = geometry(fields, layout)
    columns = len(layout.layers) * 2 * layout.kv_heads
    chunk = shape.inner * layout.head_dim * layout.element.itemsize
    index = 16 * columns * (shape.shard // shape.inner) + 4
    for i, block in enumerate(shape.blocks):
      first = (block.start - shape.origin) // shape.inner
      last = -(-(block.stop - shape.origin) // shape.inner)
      files[f'{kind}/c.0.0.{i}.0.0'] = columns * (last - first) * chunk + index
  return files


def block_digest(
    kind: str, layer: int, part: str, start: int, stop: int, rows: np.ndarray
) -> str:
  """Returns the hex BLAKE3 of one layer's K or V of one block.

  Args:
    kind: 'sliding' or 'global'.
    layer: number of the layer in the model.
    part: 'K' or 'V'.
    start: first valid position.
    stop: one past the last valid position.
    rows: [stop - start, kv_heads, head_dim] bit patterns, C order.
  """
  head = f'{kind} {layer} {part} {start} {stop}'.encode()
  return hashing.blake3_hex('kvgraft.block', head, rows.data)


def check_layouts(layouts: Mapping[str, KindLayout]) -> None:
  """Raises UsageError unless kinds, windows and layer numbers fit together."""
  _require(len(layouts) > 0, 'there is no layer kind')
  for kind, layout in layouts.items():
    _require(kind in config.KINDS,
             f'layer kind is {kind!r:.80}, expected one of {config.KINDS}')
    _require((layout.window is None) == (kind == config.GLOBAL),
             f'{kind} layers have window {layout.window}')
  numbers = [n for layout in layouts.values() for n in layout.layers]
  _require(len(set(numbers)) == len(numbers), 'a layer is in two kinds')


@dataclasses.dataclass(frozen=True)
class Manifest:
  """One complete artifact: its content section and what surrounds it.

  Attributes:
    fields: the key's fields.
    layouts: kind -> layout.
    digests: kind -> block -> hex BLAKE3 of each layer's K, then V.
    last_logits_sha256: hex SHA-256 of the logits of position end - 1.
    attempt: name of the writer's directory that holds the data files.
    created: UTC time of the deposit, ISO 8601.
    provenance: where the text came from; free, canonical JSON.
    self_test: the recorded self-test.
    profile: the full numerics profile.
  """

  fields: KeyFields
  layouts: dict[str, KindLayout]
  digests: dict[str, tuple[tuple[str, ...], ...]]
  last_logits_sha256: str
  attempt: str
  created: str
  provenance: dict[str, Any]
  self_test: dict[str, Any]
  profile: dict[str, Any]

  def __post_init__(self):
    check_layouts(self.layouts)
    _require(is_hash(self.last_logits_sha256),
             f'last_logits_sha256 is {self.last_logits_sha256!r:.80}, expected'
             ' 64 hex digits')
    _require(is_attempt(self.attempt),
             f'attempt is {self.attempt!r:.80}, expected 32 hex digits')
    _require(_is_text(self.created), 'created is not a short string')
    for name in ('provenance', 'self_test', 'profile'):
      _require(isinstance(getattr(self, name), dict), f'{name} is no object')
    _require(set(self.digests) == set(self.layouts),
             f'digests are of {sorted(self.digests)}, expected'
             f' {sorted(self.layouts)}')
    for kind, layout in self.layouts.items():
      self._check_digests(kind, layout)

  def _check_digests(self, kind: str, layout: KindLayout) -> None:
    start, end = stored_range(self.fields, layout)
    block = self.fields.block
    count = -(-end // block) - start // block
    found = self.digests[kind]
    _require(len(found) == count,
             f'{kind} has digests of {len(found)} blocks, expected {count}')
    for i, digests in enumerate(found):
      _require(len(digests) == 2 * len(layout.layers),
               f'{kind} block {start // block + i} has {len(digests)} digests,'
               f' expected K and V of {len(layout.layers)} layers')
      _require(all(map(is_hash, digests)),
               f'{kind} block {start // block + i} has a digest that is not 64'
               ' hex digits')

  @property
  def key(self) -> str:
    """The hex SHA-256 that names the artifact's directory."""
    return self.fields.key

  @functools.cached_property
  def content(self) -> dict[str, Any]:
    """The content section: all that the id covers."""
    return {
        'blocks': {k: [list(b) for b in v] for k, v in self.digests.items()},
        'fields': self.fields.to_json(),
        'last_logits_sha256': self.last_logits_sha256,
        'layouts': {k: v.to_json() for k, v in self.layouts.items()},
    }

  @functools.cached_property
  def id(self) -> str:
    """The hex SHA-256 of the content section."""
    return hashing.json_sha256('kvgraft.content', self.content)

  @property
  def nbytes(self) -> int:
    """Bytes of all data files."""
    return sum(data_files(self.fields, self.layouts).values())

  @functools.cached_property
  def geometries(self) -> dict[str, Geometry]:
    """Kind -> where its positions are stored."""
    return {k: geometry(self.fields, v) for k, v in self.layouts.items()}

  def to_bytes(self) -> bytes:
    """Returns the stored form: line 1 is the SHA-256 of the rest.

    Raises:
      TypeError: if an outer section holds a float or another foreign type.
    """
    outer = {name: getattr(self, name) for name in _OUTER}
    outer['files'] = data_files(self.fields, self.layouts)
    outer['zarr'] = {
        k: zarr_metadata(self.fields, v) for k, v in self.layouts.items()
    }
    return sign(hashing.canonical_json({
        'content': self.content, 'format': FORMAT, 'id': self.id,
        'outer': outer,
    }))

  @classmethod
  def from_bytes(cls, data: bytes, where: str = 'manifest') -> 'Manifest':
    """Returns the manifest in `data` after checking all of it.

    Args:
      data: what `to_bytes` returned.
      where: name of the object, for messages.

    Raises:
      DamageError: if the bytes are not what a deposit wrote.
      IncompatibleError: if another format version wrote them.
    """
    value = parse_signed(data, where)
    if value.get('format') != FORMAT or type(value['format']) is not int:
      raise errors.IncompatibleError(
          f'{where}: artifact format is {value.get("format")!r:.20}, this'
          f' version of kvgraft_jax reads {FORMAT}; upgrade it or deposit'
          ' again',
          'format')
    try:
      manifest = cls._from_json(value)
      canonical = manifest.to_bytes()
    except errors.UsageError as e:
      raise _edited(where, str(e)) from None
    except (KeyError, TypeError, ValueError, AttributeError,
            RecursionError) as e:
      raise _edited(where, f'malformed section ({e!s:.100})') from None
    if manifest.id != value.get('id'):
      raise _edited(where, f'its content hashes to {manifest.id[:12]}, not to'
                    f' its id {value.get("id")!s:.12}')
    if canonical != data:
      raise _edited(where, 'it has entries that do not follow from its content')
    return manifest

  @classmethod
  def _from_json(cls, value: dict[str, Any]) -> 'Manifest':
    content, outer = value['content'], value['outer']
    layouts = {
        kind: KindLayout(**dict(layout, layers=tuple(layout['layers'])))
        for kind, layout in content['layouts'].items()
    }
    digests = {
        kind: tuple(tuple(block) for block in blocks)
        for kind, blocks in content['blocks'].items()
    }
    return cls(
        fields=KeyFields(**content['fields']), layouts=layouts, digests=digests,
        last_logits_sha256=content['last_logits_sha256'],
        **{name: outer[name] for name in _OUTER},
    )


def available(manifest: Manifest) -> dict[str, tuple[int, int]]:
  """Returns kind -> the positions [first, end) that the artifact stores."""
  return {k: (v.start, v.end) for k, v in manifest.geometries.items()}


def first_difference(ours: Manifest, theirs: Manifest) -> str:
  """Names the first block in which two manifests of one key differ, or ''."""
  if ours.layouts != theirs.layouts:
    return 'layouts'
  for kind, layout in ours.layouts.items():
    pairs = zip(ours.digests[kind], theirs.digests[kind])
    for block, (a, b) in zip(ours.geometries[kind].blocks, pairs):
      for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
          return (f'{kind} layer {layout.layers[i // 2]} {PARTS[i % 2]} block'
                  f' {block.number} (positions {block.start} to'
                  f' {block.stop - 1})')
  if ours.last_logits_sha256 != theirs.last_logits_sha256:
    return 'the last logits'
  return ''


def sign(body: bytes) -> bytes:
  """Returns `body` behind a line with its plain hex SHA-256."""
  return hashlib.sha256(body).hexdigest().encode() + b'\n' + body


def parse_signed(data: bytes, where: str) -> dict[str, Any]:
  """Returns the JSON object that `sign` covers.

  Raises:
    DamageError: if line 1 is not the SHA-256 of the rest, or no object follows.
  """
  line, _, body = data.partition(b'\n')
  if line != hashlib.sha256(body).hexdigest().encode():
    raise errors.DamageError(
        f'{where}: line 1 is not the SHA-256 of the rest ({len(data)} bytes);'
        ' restore it from a copy, or remove it and deposit again')
  try:
    value = json.loads(body)
  except (ValueError, RecursionError) as e:
    raise _edited(where, f'it is not JSON ({e!s:.60})') from None
  if not isinstance(value, dict):
    raise _edited(where, 'it is no JSON object')
  return value


def _edited(where: str, what: str) -> errors.DamageError:
  return errors.DamageError(
      f'{where}: not as a deposit wrote it: {what}; restore it from a copy, or'
      ' remove it and deposit again')
