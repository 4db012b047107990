"""Writes tokenizer files: a small one of Gemma 4's kind, and given ones."""

from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Sequence
import json
import os
import pathlib
import struct
from typing import Any

SPECIAL = {
    0: '<pad>', 1: '<eos>', 2: '<bos>', 3: '<unk>', 4: '<mask>',
    46: '<|tool>', 47: '<tool|>', 48: '<|tool_call>', 49: '<tool_call|>',
    50: '<|tool_response>', 51: '<tool_response|>', 52: '<|"|>',
    98: '<|think|>', 100: '<|channel>', 101: '<channel|>',
    105: '<|turn>', 106: '<turn|>',
}
_BLANK = '\u2581'
_FIRST_BYTE = 238
_CHARACTERS = (
    ''.join(map(chr, range(0x21, 0x7f))) + _BLANK + 'äöüßéèàçñ日本語人中文🙂'
)
# Each prefix of two characters or more becomes a piece.
_WORDS = (
    'user', 'model', 'system', 'thought', 'The', '▁the', '▁is', '▁of', '▁and',
    '▁a', '▁to', '▁in', '▁capital', '▁France', '▁Paris', '▁answer', '▁you',
    '▁are', '▁helpful', 'Hello', '▁world', '▁what', 'What', '▁think', 'ing',
    'er', 'on', '...', '1', '12', '日本', '中文',
)


def gemma4_json() -> dict[str, Any]:
  """Returns the content of `tokenizer.json`: about 700 pieces."""
  pieces = dict(SPECIAL)
  runs = [c * n for c in ('\n', _BLANK, '\t') for n in range(1, 32)]
  runs.remove(_BLANK)  # Among the characters, as a word's first.
  pieces |= {107 + i: run for i, run in enumerate(runs)}
  pieces |= {_FIRST_BYTE + b: f'<0x{b:02X}>' for b in range(256)}
  unused = 0
  for i in range(_FIRST_BYTE):
    if i not in pieces:
      pieces[i] = f'<unused{unused}>'
      unused += 1
  merged = [w[:n] for w in _WORDS for n in range(2, len(w) + 1)]
  for piece in dict.fromkeys((*merged, *_CHARACTERS)):
    pieces[len(pieces)] = piece
  vocab = {pieces[i]: i for i in range(len(pieces))}
  made = list(dict.fromkeys((*runs, *merged)))
  return {
      'version': '1.0',
      'truncation': None,
      'padding': None,
      'added_tokens': [
          {'id': i, 'content': content, 'single_word': False, 'lstrip': False,
           'rstrip': False, 'normalized': False, 'special': True}
          for i, content in SPECIAL.items()
      ],
      'normalizer': {
          'type': 'Replace', 'pattern': {'String': ' '}, 'content': _BLANK,
      },
      'pre_tokenizer': {
          'type': 'Split', 'pattern': {'String': ' '},
          'behavior': 'MergedWithPrevious', 'invert': False,
      },
      'post_processor': {
          'type': 'TemplateProcessing',
          'single': [{'SpecialToken': {'id': '<bos>', 'type_id': 0}},
                     {'Sequence': {'id': 'A', 'type_id': 0}}],
          'pair': [{'SpecialToken': {'id': '<bos>', 'type_id': 0}},
                   {'Sequence': {'id': 'A', 'type_id': 0}},
                   {'SpecialToken': {'id': '<bos>', 'type_id': 1}},
                   {'Sequence': {'id': 'B', 'type_id': 1}}],
          'special_tokens': {
              '<bos>': {'id': '<bos>', 'ids': [2], 'tokens': ['<bos>']},
          },
      },
      'decoder': {
          'type': 'Sequence',
          'decoders': [
              {'type': 'Replace', 'pattern': {'String': _BLANK},
               'content': ' '},
              {'type': 'ByteFallback'},
              {'type': 'Fuse'},
          ],
      },
      'model': {
          'type': 'BPE', 'dropout': None, 'unk_token': '<unk>',
          'continuing_subword_prefix': None, 'end_of_word_suffix': None,
          'fuse_unk': True, 'byte_fallback': True, 'ignore_merges': False,
          'vocab': vocab,
          'merges': all_merges(made, range(len(made)), vocab),
      },
  }


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file as the published ones look."""
  path.write_text(
      json.dumps(value, indent=2, ensure_ascii=False) + '\n', encoding='utf-8'
  )


def write_gemma4(folder: str | os.PathLike[str]) -> None:
  """Writes tokenizer.json, tokenizer_config.json and generation_config.json.

  Args:
    folder: an existing directory; files there are replaced.
  """
  folder = pathlib.Path(folder)
  write_json(folder / 'tokenizer.json', gemma4_json())
  write_json(folder / 'tokenizer_config.json', {
      'tokenizer_class': 'GemmaTokenizer', 'bos_token': '<bos>',
      'eos_token': '<eos>', 'pad_token': '<pad>', 'unk_token': '<unk>',
      'mask_token': '<mask>', 'padding_side': 'left',
  })
  write_json(folder / 'generation_config.json', {
      'bos_token_id': 2, 'eos_token_id': [1, 106, 50], 'pad_token_id': 0,
      'do_sample': True, 'temperature': 1.0, 'top_k': 64, 'top_p': 0.95,
  })


def sentencepiece_model(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> bytes:
  """Returns a BPE `tokenizer.model` with Gemma's flags.

  Args:
    pieces: text of each id; ids 0 to 3 are pad, eos, bos and unk.
    scores: of each id; higher merges earlier.
    kinds: of each id, as the file numbers them.
  """
  out = b''.join(
      _field(1, _field(1, piece.encode('utf-8'))
             + b'\x15' + struct.pack('<f', score) + _field(3, int(kind)))
      for piece, score, kind in zip(pieces, scores, kinds)
  )
  model_type, byte_fallback, bpe = 3, 35, 2
  trainer = _field(model_type, bpe) + _field(byte_fallback, 1)
  # Ids of unk, bos, eos and pad, then their pieces.
  for number, token in enumerate((3, 2, 1, 0)):
    trainer += _field(40 + number, token)
    trainer += _field(45 + number, pieces[token].encode('utf-8'))
  # No blank in front, no blank removed.
  normalizer = _field(1, b'identity') + _field(3, 0) + _field(4, 0)
  return out + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: bytes | int) -> bytes:
  """Returns one protobuf field."""
  if isinstance(value, int):
    return _varint(number << 3) + _varint(value)
  return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
  out = bytearray()
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  return bytes((*out, value))


def all_merges(
    pieces: Sequence[str], order: Iterable[int], known: Container[str]
) -> list[tuple[str, str]]:
  """Returns each way to make a piece of two known ones, as converters do.

  Args:
    pieces: text of each id.
    order: ids of the pieces to make, first merged first.
    known: all pieces.
  """
  return [
      (pieces[i][:n], pieces[i][n:])
      for i in order for n in range(1, len(pieces[i]))
      if pieces[i][:n] in known and pieces[i][n:] in known
  ]
