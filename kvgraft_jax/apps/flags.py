"""Flags that commands share, each defined once, and `--config` files.

Every command parses into a `FlagValues` of its own, so that its help shows its
own flags and several commands can run in one process.
"""

from collections.abc import Sequence
import functools
import os
import runpy
from typing import Any

from absl import flags

from kvgraft_jax import errors


def common(fv: flags.FlagValues) -> None:
  """Defines what every command takes."""
  flags.DEFINE_string(
      'config', None, 'Python file whose get_config() returns flag values; the'
      ' command line wins.', flag_values=fv)
  flags.DEFINE_boolean(
      'traceback', False, 'Show where an error came from.', flag_values=fv)


def model(
    fv: flags.FlagValues, *, one_dtype: bool = True, beyond: bool = True
) -> None:
  """Defines the model and its numerics.

  Args:
    fv: flags of the command.
    one_dtype: with --dtype and what depends on its being one.
    beyond: with --allow_beyond_trained.
  """
  flags.DEFINE_string(
      'model', 'gemma3-270m', 'gemma3-270m, a Hugging Face or Orbax directory,'
      ' a .gguf file, tiny:SEED, tiny-gemma4-SIZE:SEED or random:PRESET:SEED.',
      flag_values=fv)
  if one_dtype:
    flags.DEFINE_enum(
        'dtype', 'bfloat16', ['bfloat16', 'float32'],
        'Of weights, operands and cache.', flag_values=fv)
    flags.DEFINE_integer(
        'capacity', None, "Most positions of a context; the model's by"
        ' default.', lower_bound=1, flag_values=fv)
  if one_dtype and beyond:
    beyond_trained(fv)
  for name, what in (
      ('chunk', 'Rows of a prefill step'), ('tile', 'Rows of a decode step'),
      ('page', 'Positions of an attention partial')):
    flags.DEFINE_integer(
        name, None, f"{what}; the device's default if left out.",
        lower_bound=2, flag_values=fv)
  flags.DEFINE_integer(
      'threads', None, 'CPU threads; all cores by default.', lower_bound=1,
      upper_bound=1024, flag_values=fv)


def beyond_trained(fv: flags.FlagValues) -> None:
  """Defines whether contexts may be longer than the model was trained for."""
  flags.DEFINE_boolean(
      'allow_beyond_trained', False, 'Let a context be longer than the model'
      ' was trained for, up to 16,777,216 positions: just as exact, but what'
      ' the model makes of it is untried.', flag_values=fv)


def store(fv: flags.FlagValues) -> None:
  """Defines the store."""
  flags.DEFINE_string(
      'store', None, 'A directory, or a URL such as gs://BUCKET/DIR.',
      flag_values=fv)


def artifact(fv: flags.FlagValues, *, length: bool = True) -> None:
  """Defines store and artifact, and how much of it to take."""
  store(fv)
  flags.DEFINE_string(
      'artifact', None, 'Id, 4 or more of its first digits, key, or name.',
      flag_values=fv)
  if length:
    flags.DEFINE_integer(
        'length', None, 'Graft positions [0, length); all by default.',
        flag_values=fv)


def on_mismatch(fv: flags.FlagValues, choices: Sequence[str]) -> None:
  """Defines what happens where the numerics class differs."""
  flags.DEFINE_enum(
      'on_mismatch', 'fail', list(choices),
      "If this machine's numerics class is not the artifact's.",
      flag_values=fv)


def text(
    fv: flags.FlagValues, file_flag: str = 'prompt_file', prefix: str = '',
    what: str = 'the text',
) -> None:
  """Defines where a text comes from: literally, a file, or token ids.

  Args:
    fv: flags of the command.
    file_flag: name of the flag for a text file.
    prefix: '' for --prompt and --tokens_file, else the name of the text:
      --PREFIX and --PREFIX_tokens_file.
    what: for the help.
  """
  flags.DEFINE_string(
      prefix or 'prompt', None, f'{what[0].upper()}{what[1:]}, as it is.',
      flag_values=fv)
  flags.DEFINE_string(
      file_flag, None, f'UTF-8 file with {what}.', flag_values=fv)
  flags.DEFINE_string(
      f'{prefix}_tokens_file' if prefix else 'tokens_file', None,
      f'JSON list with the token ids of {what}, taken verbatim.',
      flag_values=fv)
  if not prefix:
    double_bos(fv)


def messages(fv: flags.FlagValues) -> None:
  """Defines where a conversation comes from."""
  flags.DEFINE_string(
      'messages', None, 'JSON file with a whole conversation, a list of'
      ' {"role", "content"}, in the place of a text. The chat template is the'
      " model's own or its family's; base models have learnt none, and cannot"
      ' be told apart.', flag_values=fv)
  flags.DEFINE_boolean(
      'thinking', False, 'With --messages: let the model think first; refused'
      ' where its chat template knows no thinking.', flag_values=fv)


def double_bos(fv: flags.FlagValues) -> None:
  """Defines whether a doubled bos is let through."""
  flags.DEFINE_boolean(
      'allow_double_bos', False, 'Let a second bos in front of a text pass.',
      flag_values=fv)


def block(fv: flags.FlagValues) -> None:
  """Defines the block of a deposit."""
  flags.DEFINE_integer(
      'block', None, 'Positions of a stored block, a multiple of the page.',
      lower_bound=1, flag_values=fv)


def stream(fv: flags.FlagValues) -> None:
  """Defines the memory of a streamed context; see `memory.parse_bytes`."""
  flags.DEFINE_string(
      'device_kv_bytes', None, 'Stream the context: at most so many bytes of'
      ' keys and values on the device, such as 48MB or 1.5GiB, however long it'
      ' is; the others flow through from host memory and store. Without it all'
      ' of them are on the device.', flag_values=fv)
  flags.DEFINE_string(
      'host_kv_bytes', None, 'With --device_kv_bytes: at most so many bytes of'
      ' them in host memory; the others are read from the store. Half of the'
      ' memory that is available by default.', flag_values=fv)


def sampling(fv: flags.FlagValues) -> None:
  """Defines how tokens are chosen."""
  flags.DEFINE_integer(
      'max_new_tokens', 64, 'Most new tokens; 0 for the logits alone.',
      lower_bound=0, flag_values=fv)
  flags.DEFINE_float(
      'temperature', 0.0, '0 is greedy.', flag_values=fv)
  flags.DEFINE_integer(
      'top_k', 0, 'Candidates kept; 0 keeps all.', flag_values=fv)
  flags.DEFINE_float(
      'top_p', 1.0, 'Probability kept, behind top_k.', flag_values=fv)
  flags.DEFINE_integer('seed', 0, 'Of the draws.', flag_values=fv)
  flags.DEFINE_integer(
      'num_samples', 1, 'How many continuations.', flag_values=fv)
  flags.DEFINE_integer(
      'speculate', None, 'Most rows of a decode step, which checks tokens'
      ' guessed by looking up the last two in the context: the same bits in'
      ' fewer steps. 1 is none; left out, what pays on this device.',
      lower_bound=1, flag_values=fv)


@functools.cache
def _shared() -> frozenset[str]:
  """Returns the names of the flags that several commands share."""
  fv = flags.FlagValues()
  model(fv)
  artifact(fv)
  on_mismatch(fv, ('fail',))
  text(fv)
  messages(fv)
  block(fv)
  stream(fv)
  sampling(fv)
  return frozenset(fv)


def number(name: str, text: str) -> int:
  """Returns an item of a list of numbers, or raises UsageError."""
  try:
    return int(text)
  except ValueError:
    raise errors.UsageError(
        f'--{name}: expected whole numbers with commas between, found'
        f' {text!r:.80}') from None


def require(args: Any, *names: str) -> None:
  """Raises UsageError unless each of these flags has a value."""
  for name in names:
    if not getattr(args, name):
      raise errors.UsageError(
          f'--{name} is missing; give it, or see the command\'s --help')


def parse(
    fv: flags.FlagValues, argv: Sequence[str], positional: Sequence[str] = (),
) -> None:
  """Parses a command line and the config file that it names.

  Args:
    fv: with all flags of the command defined.
    argv: without the command.
    positional: names of the flags that arguments without a flag fill in order.

  Raises:
    UsageError: if an argument, a flag, a value or a key of the config file is
      not accepted.
  """
  try:
    rest = fv(['kvgraft', *argv], known_only=False)[1:]
  except flags.Error as e:
    raise errors.UsageError(' '.join(str(e).split())) from None
  for name, value in zip(positional, rest):
    _place(fv, name, value)
  if len(rest) > len(positional):
    raise errors.UsageError(
        f'unexpected argument {rest[len(positional)]!r}; values are given as'
        ' --flag=VALUE')
  if fv['config'].value is not None:
    for name, value in _read_config(fv['config'].value).items():
      _set(fv, name, value)


def _place(fv: flags.FlagValues, name: str, value: str) -> None:
  if fv[name].present:
    raise errors.UsageError(
        f'--{name}={fv[name].value} and the argument {value!r} in its place'
        ' were given; give one of them')
  try:
    fv[name].parse(value)
  except flags.Error as e:
    raise errors.UsageError(' '.join(str(e).split())) from None


def _read_config(path: str) -> dict[str, Any]:
  if not os.path.isfile(path):
    raise errors.UsageError(
        f'--config={path}: no such file; give a Python file with get_config()')
  try:
    found = runpy.run_path(path).get('get_config')
    values = found() if callable(found) else None
  except (Exception, SystemExit) as e:  # Whatever the file's code does.
    raise errors.UsageError(
        f'--config={path}: {type(e).__name__}: {e}; correct the file') from None
  if not isinstance(values, dict):
    raise errors.UsageError(
        f'--config={path}: expected a function get_config() that returns a dict'
        f' of flag values, found {type(values).__name__}')
  return values


def _set(fv: flags.FlagValues, name: Any, value: Any) -> None:
  where = f'--config={fv["config"].value}'
  if name in _shared() and name not in fv:
    return  # One file serves several commands.
  if name not in fv or name in ('config', 'flagfile', 'undefok'):
    raise errors.UsageError(
        f'{where}: {name!r} is not a flag of this command; remove it, or see'
        " the command's --help")
  if fv[name].present or value is None:
    return
  try:
    fv[name].parse(value)
  except (flags.Error, TypeError, ValueError) as e:
    raise errors.UsageError(f'{where}: {" ".join(str(e).split())}') from None
