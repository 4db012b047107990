"""Text to token ids and back; a text gets a bos in front."""

from typing import Any

from absl import flags as absl_flags

from kvgraft_jax import errors
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags
from kvgraft_jax.apps import inputs

EXAMPLE = "--prompt='Hello world'"


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.text(fv, 'text_file')
  absl_flags.DEFINE_boolean(
      'bos', True, 'Put bos in front of a text, as at position 0.',
      flag_values=fv)
  absl_flags.DEFINE_string(
      'model', 'gemma3-270m', 'gemma3-270m, a Hugging Face or Orbax directory,'
      ' a .gguf file or tiny:SEED.', flag_values=fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Converts; returns exit code and JSON."""
  what = inputs.require_input(args, 'text_file')
  tokenizer = common.load_tokenizer(args.model)
  if isinstance(what, str):
    ids = tokenizer.encode(what, add_bos=args.bos)
  else:
    ids = what
    for i, token in enumerate(ids):
      if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
        raise errors.UsageError(
            f'tokens[{i}]: expected an id from 0 to {tokenizer.vocab_size - 1},'
            f' found {token!r:.80}')
  inputs.refuse_double_bos(args, tokenizer, ids, 0)
  pieces = [tokenizer.piece(i) for i in ids]
  text = tokenizer.decode(ids)
  common.say(' '.join(f'{i}:{p!r}' for i, p in zip(ids, pieces)))
  return 0, {'token_ids': ids, 'text': text, 'pieces': pieces,
             'tokens': len(ids),
             'round_trip': text == what if isinstance(what, str) else None}


if __name__ == '__main__':
  cli.start('tokenize')
