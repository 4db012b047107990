"""The whole story in two processes: deposit, graft, and the proof.

One process computes a document's KV state and stores it. This one grafts it,
asks a question behind it, then computes the same request from nothing and
compares the logits byte for byte.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags as absl_flags

import kvgraft_jax
from kvgraft_jax import errors
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import continuation
from kvgraft_jax.apps import flags
from kvgraft_jax.apps import inputs

EXAMPLE = '--store=/tmp/store'

_DATA = pathlib.Path(kvgraft_jax.__file__).parent / 'data'
# Characters of the document that the tiny model's context has room for.
_TINY_CHARACTERS = 1500


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_string(
      'store', None, 'Keep the artifact in this store; a temporary one by'
      ' default.', flag_values=fv)
  absl_flags.DEFINE_string(
      'document', None, 'UTF-8 file to deposit; an embedded one by default.',
      flag_values=fv)
  absl_flags.DEFINE_string(
      'question', None, 'Text behind the document; an embedded one by default.',
      flag_values=fv)
  absl_flags.DEFINE_integer(
      'max_new_tokens', 24, 'Most new tokens.', lower_bound=1, flag_values=fv)
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Tells the story; returns exit code and JSON."""
  with tempfile.TemporaryDirectory(prefix='kvgraft-demo-') as scratch:
    return _story(args, scratch, args.store or os.path.join(scratch, 'store'))


def _story(args: Any, scratch: str, where: str) -> tuple[int, dict[str, Any]]:
  document = args.document or str(_DATA / 'document.txt')
  if args.model.startswith('tiny:') and not args.document:
    text = (_DATA / 'document.txt').read_text(encoding='utf-8')
    document = os.path.join(scratch, 'document.txt')
    pathlib.Path(document).write_text(
        text[:_TINY_CHARACTERS], encoding='utf-8')
  question = args.question
  if question is None:
    question = (_DATA / 'question.txt').read_text(encoding='utf-8').rstrip('\n')

  common.say(f'1. A first process computes {os.path.basename(document)} with'
             f' {args.model} ({args.dtype}) and stores its KV state.')
  common.say('   (The first use on a machine also converts the weights,'
             ' compiles and runs the self-test: some minutes.)')
  deposit = _deposit(args, document, where)
  if deposit['existed']:
    common.say(f'   It was in {where} already; nothing was computed.')
  else:
    common.say(f'   {deposit["tokens"]:,} tokens computed and stored as'
               f' {deposit["bytes"]:,} bytes in {deposit["deposit_s"]:.1f} s.')
  common.say(f'   Artifact {deposit["artifact"][:16]}. That process has ended.')

  common.say('2. A second process grafts it and asks a question behind it:')
  store = kvgraft_jax.Store(where)
  began = time.perf_counter()
  model = common.load_model(args)
  ids = inputs.to_ids(
      args, model, question, deposit['end'])
  options = continuation.Options(args.max_new_tokens)
  total = deposit['end'] + len(ids)
  model.warm_up(total, len(ids))
  startup_s = time.perf_counter() - began
  common.say(_indent(question))
  grafted_context, grafted = continuation.answer(
      options, lambda: kvgraft_jax.graft(
          model, store, deposit['artifact'], record=False), ids)
  inputs.boundary_merges(
      model, grafted_context.tokens[:deposit['end']], question)
  common.say(f'   {grafted["tokens_restored"]:,} tokens restored,'
             f' {grafted["tokens_computed"]} computed: first token after'
             f' {grafted["ttft_s"] * 1000:.0f} ms.')

  common.say('3. The same process computes the same tokens from nothing:')
  model.warm_up(total, total)
  tokens = grafted_context.tokens[:total]
  with common.Progress('   prefill') as bar:
    _, fresh = continuation.answer(
        options, lambda: model.prefill(
            tokens, record=False, progress=bar.callback), [], stream=False)
  common.say(f'   {fresh["tokens_computed"]:,} tokens computed: first token'
             f' after {fresh["ttft_s"]:.2f} s.')

  equal = grafted['logits_sha256'] == fresh['logits_sha256']
  same_text = grafted['token_ids'] == fresh['token_ids']
  ratio = fresh['ttft_s'] / grafted['ttft_s']
  common.say('4. SHA-256 of the logits that chose the first token:')
  common.say(f'   grafted {grafted["logits_sha256"]}')
  common.say(f'   fresh   {fresh["logits_sha256"]}')
  common.say(f'   {"EQUAL, byte for byte" if equal else "NOT EQUAL"}; the'
             f' {len(fresh["token_ids"])} new tokens'
             f' {"are the same" if same_text else "DIFFER"}; the first token'
             f' came {ratio:.0f} times sooner.')
  return int(not (equal and same_text)), {
      'sha256_equal': equal, 'text_equal': same_text,
      'ttft_cold_s': fresh['ttft_s'], 'ttft_graft_s': grafted['ttft_s'],
      'ratio': round(ratio, 2), 'logits_sha256': grafted['logits_sha256'],
      'logits_sha256_fresh': fresh['logits_sha256'],
      'artifact': deposit['artifact'], 'bytes': deposit['bytes'],
      'tokens_deposited': deposit['tokens'],
      'tokens_restored': grafted['tokens_restored'],
      'tokens_computed': grafted['tokens_computed'],
      'tokens_computed_fresh': fresh['tokens_computed'],
      'text': grafted['text'], 'text_fresh': fresh['text'],
      'model': args.model, 'dtype': args.dtype,
      'deposit_s': deposit['deposit_s'], 'startup_s': round(startup_s, 3),
  }


def _deposit(args: Any, document: str, store: str) -> dict[str, Any]:
  """Deposits in a process of its own; returns its JSON."""
  command = [
      sys.executable, '-m', 'kvgraft_jax.apps.deposit', f'--store={store}',
      f'--text_file={document}']
  for name in ('model', 'dtype', 'capacity', 'allow_beyond_trained', 'chunk',
               'tile', 'page', 'threads'):
    value = getattr(args, name)
    if value is not None:
      command.append(f'--{name}={value}')
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
  if done.returncode == 2:
    raise errors.UsageError('the deposit was refused, as said above')
  if done.returncode:
    raise errors.KvgraftError(
        f'the deposit failed with exit code {done.returncode}, as said above')
  return json.loads(done.stdout.splitlines()[-1])


def _indent(text: str) -> str:
  return '\n'.join('   | ' + line for line in text.strip().splitlines())


if __name__ == '__main__':
  cli.start('demo')
