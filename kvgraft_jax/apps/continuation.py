"""Answers one request: a context from anywhere, tokens behind it, new tokens.

Grafted, recomputed and fresh contexts take the same path here.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import sys
import time
from typing import Any

import kvgraft_jax
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import sampling
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.apps import common


@dataclasses.dataclass(frozen=True)
class Options:
  """How to continue: the sampling flags, checked."""

  max_new_tokens: int
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  num_samples: int = 1
  speculate: int | None = None

  @classmethod
  def of(cls, args: Any) -> Options:
    """Returns the options that the flags give.

    Raises:
      UsageError: if one is out of its range.
    """
    found = cls(**{
        f.name: getattr(args, f.name) for f in dataclasses.fields(cls)})
    sampling.SamplingParams(
        found.temperature, found.top_k, found.top_p, found.seed).check()
    if found.num_samples < 1:
      raise errors.UsageError(
          f'num_samples: expected at least 1, found {found.num_samples}')
    return found


def answer(
    options: Options, build: Callable[[], kvgraft_jax.Context], ids: list[int],
    *, stream: bool = True,
) -> tuple[kvgraft_jax.Context, dict[str, Any]]:
  """Builds a context, appends `ids` and generates.

  Args:
    options: how to continue.
    build: makes the context; its time counts.
    ids: tokens to append; none computes the last position alone.
    stream: print the text while it is generated.

  Returns:
    The context, extended by a single sample, and the JSON of the request.
  """
  began = time.perf_counter()
  context = build()
  context.extend(ids)
  logits = context.logits()
  ttft_s = time.perf_counter() - began
  result = {
      'prompt_tokens': context.length,
      'tokens_restored': context.tokens_restored,
      'tokens_computed': context.tokens_computed,
      'logits_sha256': hashing.logits_sha256(logits),
  }
  began = time.perf_counter()
  made = []
  if options.max_new_tokens:
    stream = stream and options.num_samples == 1
    printer = _Printer(context.model.tokenizer if stream else None)
    made = context.generate(
        **dataclasses.asdict(options), on_token=printer.push)
    printer.finish()
  decoded = sum(len(g.token_ids) for g in made)
  steps = sum(g.steps for g in made)
  rows = context.model.speculative_rows(options.speculate)
  for number, sample in enumerate(made if len(made) > 1 else ()):
    common.say(f'--- sample {number}\n{sample.text}')
  return context, {
      'text': made[0].text if made else '',
      'token_ids': made[0].token_ids if made else [],
      **result,
      'tokens_decoded': decoded,
      'decode_steps': steps,
      'tokens_per_step': round(decoded / steps, 3) if steps else None,
      'speculate': rows if options.num_samples == 1 else 1,
      'finish_reason': made[0].finish_reason if made else 'length',
      'kv': dataclasses.asdict(context.usage()),
      'samples': [{'text': g.text, 'token_ids': g.token_ids,
                   'finish_reason': g.finish_reason} for g in made],
      'ttft_s': round(ttft_s, 5),
      'decode_s': round(time.perf_counter() - began, 5),
  }


class _Printer:
  """Prints tokens on stdout as they come."""

  def __init__(self, tokenizer: Any):
    self._decoder = tokenizer and tokenizer_lib.StreamDecoder(tokenizer)
    self._wrote = False

  def push(self, unused_sample: int, token: int) -> None:
    if self._decoder:
      self._write(self._decoder.push(token))

  def finish(self) -> None:
    if self._decoder:
      self._write(self._decoder.finish())
      if self._wrote:
        self._write('\n')

  def _write(self, text: str) -> None:
    if text:
      sys.stdout.write(common.printable(text))
      sys.stdout.flush()
      self._wrote = True
