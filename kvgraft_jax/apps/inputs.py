"""Texts and token ids from flags: read, checked, placed at a position."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

import kvgraft_jax
from kvgraft_jax import chat
from kvgraft_jax import errors
from kvgraft_jax.apps import common

# The longest context, 2**24 token ids, takes half of it; more is not read.
_MOST_BYTES = 256 << 20
# Of one token; the longest pieces of known vocabularies are below 100.
_BYTES_PER_TOKEN = 256
# Tokens in front of a boundary within which a merge would show.
_BOUNDARY = 20


@dataclasses.dataclass(frozen=True)
class Conversation:
  """A whole conversation, from position 0.

  Attributes:
    messages: as from `chat.parse_messages`.
    thinking: whether the model is to think first.
  """

  messages: list[dict[str, Any]]
  thinking: bool


Input = str | list[Any] | Conversation


def _read_bytes(flag: str, path: str) -> bytes:
  """Returns a file's bytes, at most as many as could be of use."""
  try:
    with open(path, 'rb') as f:
      data = f.read(_MOST_BYTES + 1)
  except (OSError, ValueError) as e:
    reason = getattr(e, 'strerror', None) or str(e)
    raise errors.UsageError(
        f'--{flag}={path}: {reason}; expected a file that can be read'
    ) from None
  if len(data) > _MOST_BYTES:
    raise errors.CapacityError(
        f'--{flag}={path}: more than {_MOST_BYTES >> 20} MiB, which no context'
        ' holds; give a shorter file')
  return data


def _read_text(flag: str, path: str) -> str:
  try:
    return _read_bytes(flag, path).decode('utf-8')
  except UnicodeDecodeError as e:
    raise errors.UsageError(
        f'--{flag}={path}: not valid UTF-8 at byte {e.start}; convert the'
        ' file') from None


def read_input(
    args: Any, file_flag: str = 'prompt_file', prefix: str = ''
) -> str | list[Any] | None:
  """Returns the text or the token ids that the flags name.

  Args:
    args: flags.
    file_flag: name of the flag for a text file.
    prefix: as in `flags.text`.

  Returns:
    A text, a list (not yet checked) of ids, or None if none was given.

  Raises:
    UsageError: if several were given, a file cannot be used, or it is empty.
  """
  text_flag = prefix or 'prompt'
  ids_flag = f'{prefix}_tokens_file' if prefix else 'tokens_file'
  given = [n for n in (text_flag, file_flag, ids_flag)
           if getattr(args, n) is not None]
  if not given:
    return None
  if len(given) > 1:
    raise errors.UsageError(
        f'--{given[0]} and --{given[1]} exclude each other; give one of them')
  flag, value = given[0], getattr(args, given[0])
  text = value if flag == text_flag else _read_text(flag, value)
  if flag == ids_flag:
    return _parse_ids(flag, value, text)
  if not text:
    raise errors.UsageError(
        f'--{flag}: the text is empty, expected at least one character')
  return text


def read_ids(flag: str, path: str) -> list[Any]:
  """Returns the (not yet checked) token ids of a JSON file.

  Raises:
    UsageError: if it cannot be read or is no list with an element.
  """
  return _parse_ids(flag, path, _read_text(flag, path))


def _parse_ids(flag: str, value: str, text: str) -> list[Any]:
  try:
    ids = json.loads(text)
  except (ValueError, RecursionError) as e:
    raise errors.UsageError(
        f'--{flag}={value}: expected a JSON list of token ids, found no JSON'
        f' ({e!s:.80})') from None
  if not isinstance(ids, list) or not ids:
    raise errors.UsageError(
        f'--{flag}={value}: expected a JSON list with at least one token id,'
        f' found {"an empty list" if ids == [] else type(ids).__name__}')
  return ids


def require_input(
    args: Any, file_flag: str = 'prompt_file', prefix: str = ''
) -> str | list[Any]:
  """Returns `read_input`, or raises UsageError if nothing was given."""
  found = read_input(args, file_flag, prefix)
  if found is None:
    names = [prefix or 'prompt', file_flag,
             f'{prefix}_tokens_file' if prefix else 'tokens_file']
    names += ['messages'] if 'messages' in args else []
    raise errors.UsageError(
        f'no text: give --{", --".join(names[:-1])} or --{names[-1]}')
  return found


def read_request(args: Any, file_flag: str = 'prompt_file') -> Input | None:
  """Returns `read_input`, or the conversation that --messages names.

  Raises:
    UsageError: as `read_input`; if both were given; if it is no conversation.
  """
  other = read_input(args, file_flag)
  if args.messages is None:
    if args.thinking:
      raise errors.UsageError('--thinking needs --messages')
    return other
  if other is not None:
    raise errors.UsageError(
        '--messages is a whole conversation and excludes other texts; give one'
        ' of them')
  text = _read_text('messages', args.messages)
  return Conversation(
      chat.parse_messages(text, f'--messages={args.messages}'), args.thinking)


def require_request(args: Any, file_flag: str = 'prompt_file') -> Input:
  """Returns `read_request`, or raises UsageError if nothing was given."""
  return read_request(args, file_flag) or require_input(args, file_flag)


def about(what: Input | None) -> dict[str, Any]:
  """Returns what a result says of a conversation; nothing of another input."""
  if not isinstance(what, Conversation):
    return {}
  return {'messages': len(what.messages), 'thinking': what.thinking}


def to_ids(
    args: Any, model: kvgraft_jax.Model, what: Input, start: int, *,
    front: Callable[[], Sequence[int]] = tuple, answer: bool = True,
    length_flag: str = '--length',
) -> list[int]:
  """Returns checked token ids of an input that stands at `start`.

  A text gets a bos exactly at position 0; ids are taken verbatim; of a
  conversation the part behind `start` is returned.

  Args:
    args: flags.
    model: whose tokenizer and chat template are used.
    what: the input.
    start: its first position.
    front: for a conversation, gives the ids of the positions [0, start).
    answer: open the model's turn behind a conversation.
    length_flag: for a conversation, the flag that decides `start`.

  Raises:
    UsageError: if ids are out of range, a bos is doubled, a text comes without
      a tokenizer, a template refuses a conversation, or it does not begin with
      `front`.
    CapacityError: if they do not fit.
  """
  if isinstance(what, Conversation):
    return _conversation_ids(model, what, front(), answer, length_flag)
  tokenizer = model.tokenizer
  if isinstance(what, str):
    tokenizer = _tokenizer(model)
    _check_size(model, what)
    ids = tokenizer.encode(what, add_bos=start == 0)
  else:
    ids = what
  ids = model.check_tokens(ids, start)
  if tokenizer is not None:
    refuse_double_bos(args, tokenizer, ids, start)
  return ids


def _tokenizer(model: kvgraft_jax.Model) -> Any:
  if model.tokenizer is None:
    raise errors.UsageError(
        f'model {model.source!r} has no tokenizer and takes token ids only;'
        ' give a --tokens_file')
  return model.tokenizer


def _check_size(model: kvgraft_jax.Model, text: str) -> None:
  if len(text) > _BYTES_PER_TOKEN * model.capacity:
    raise errors.CapacityError(
        f'a text of {len(text):,} characters is beyond the capacity of'
        f' {model.capacity} tokens; shorten it')


def _conversation_ids(
    model: kvgraft_jax.Model, what: Conversation, front: Sequence[int],
    answer: bool, length_flag: str,
) -> list[int]:
  tokenizer = _tokenizer(model)
  _check_size(model, json.dumps(what.messages))
  ids = model.check_tokens(model.chat_tokens(
      what.messages, thinking=what.thinking, add_generation_prompt=answer))
  rest = chat.tail(tokenizer, ids, front, length_flag=length_flag)
  if model.chat_template is None:
    common.note(f'{model.source} has no chat template; used the built-in one of'
                f' {model.config.family}, which base models have not learnt')
  return rest


def refuse_double_bos(
    args: Any, tokenizer: Any, ids: Sequence[int], start: int
) -> None:
  """Raises UsageError if ids that stand at `start` double the bos."""
  bos = tokenizer.bos_id
  doubled = ids[0] == bos if start else list(ids[:2]) == [bos, bos]
  if doubled and not args.allow_double_bos:
    raise errors.UsageError(
        f'a second bos (id {bos}) at position {start or 1}; remove it from the'
        ' text or the ids, or pass --allow_double_bos')


def chain_tokens(
    store: kvgraft_jax.Store, ref: Any, length: int
) -> list[int]:
  """Returns the token ids [0, length) of an artifact and its parents."""
  from kvgraft_jax import grafting  # Imports jax, which --help does not need.
  return grafting.chain_tokens(store, grafting.chain(store, ref, length))


def graft_length(
    store: kvgraft_jax.Store, ref: Any, length: int | None
) -> int:
  """Returns the positions that a graft takes, once they are known to be there.

  Raises:
    UsageError: if `length` is not one of 1 to the artifact's end.
    DamageError: if a parent is lost.
  """
  from kvgraft_jax import grafting  # Imports jax, which --help does not need.
  return grafting.chain(store, ref, length)[-1].stop


def boundary_merges(
    model: kvgraft_jax.Model, before: Sequence[int],
    text: Input | None,
) -> bool:
  """Tells, and notes, whether a text would merge with the tokens before it."""
  if not isinstance(text, str) or model.tokenizer is None:
    return False
  encode = model.tokenizer.encode
  tail = model.tokenizer.decode(before[-_BOUNDARY:])
  apart = encode(tail, add_bos=False) + encode(text, add_bos=False)
  if encode(tail + text, add_bos=False) == apart:
    return False
  common.note(
      f'{tail[-12:]!r} and {text[:12]!r} would be tokenized otherwise as one'
      ' text; they are kept apart, and results stay exact (end the text without'
      ' a blank, or begin the next one with it)')
  return True


def parse_rows(text: str | None, count: int) -> list[int]:
  """Returns the rows of '0,5,..' or 'all'; the last one for None.

  Raises:
    UsageError: if it is no list of numbers from 0 to count - 1.
  """
  if text is None:
    return [count - 1]
  if text == 'all':
    return list(range(count))
  try:
    rows = [int(part) for part in text.split(',')]
  except ValueError:
    raise errors.UsageError(
        f"--rows={text:.80}: expected numbers such as 0,5,9 or 'all'") from None
  for row in rows:
    if not 0 <= row < count:
      raise errors.UsageError(
          f'--rows: expected 0 to {count - 1}, found {row}')
  return rows
