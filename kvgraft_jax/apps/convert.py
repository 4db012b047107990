"""Writes a model as a Hugging Face directory or an Orbax tree."""

from typing import Any

from absl import flags as absl_flags

from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '--model=gemma3-270m --out=/tmp/gemma3-270m'


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_string(
      'model', 'gemma3-270m', 'gemma3-270m, a Hugging Face or Orbax directory'
      ' or a .gguf file.', flag_values=fv)
  absl_flags.DEFINE_string(
      'out', None, 'Directory to make.', flag_values=fv)
  absl_flags.DEFINE_enum(
      'format', 'safetensors', ['safetensors', 'orbax'],
      'safetensors makes a Hugging Face directory.', flag_values=fv)
  absl_flags.DEFINE_enum(
      'dtype', None, ['bfloat16', 'float32'],
      "Of every value; the checkpoint's own by default, which a GGUF file hands"
      ' out as float32. Another dtype makes another model: artifacts of the'
      ' original do not graft with it.', flag_values=fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Converts; returns exit code and JSON."""
  flags.require(args, 'model', 'out')
  # They import jax; --help does not.
  from kvgraft_jax.checkpoints import convert
  from kvgraft_jax.checkpoints import gguf_gemma
  from kvgraft_jax.checkpoints import resolve
  source = resolve.open_source(args.model)
  with common.Progress('convert') as bar:
    result = convert.convert(
        source, args.out, args.format, args.dtype, bar.callback)
  if source.tokenizer is not None and not result.tokenizer:
    common.note('the tokenizer could not be written exactly and was left out;'
                ' the result takes token files only')
  if result.tokenizer and isinstance(source, gguf_gemma.GemmaGguf):
    common.note(
        f'the tokenizer is in another form now: artifacts of {args.model} do'
        f' not graft with {args.out}, nor the other way')
  common.say(f'{result.tensors} tensors, {result.nbytes:,} bytes:'
             f' {args.out}')
  return 0, {
      'out': args.out, 'format': args.format, 'tensors': result.tensors,
      'bytes': result.nbytes, 'model_fingerprint': result.model_fingerprint,
      'tokenizer': list(result.tokenizer)}


if __name__ == '__main__':
  cli.start('convert')
