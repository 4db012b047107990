r"""Gemma 4 E2B from a checkpoint, in bfloat16.

    kvgraft deposit --config=configs/gemma4_e2b.py --model=DIR \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma4_e2b.py --model=DIR \
        --store=/tmp/store --artifact=manual --continuations=50

DIR is a Hugging Face or Orbax directory or a GGUF file; without the flag it is
./gemma4-e2b. Expected of `verify`: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma4-e2b --context=32768` says on CPU:
  4,628,569,379 parameters, 9,257,710,732 bytes of weights;
  18,432 bytes of K and V a token: 12,288 sliding, 6,144 global;
  427,819,008 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma4-e2b', 'dtype': 'bfloat16', 'capacity': 32768}
