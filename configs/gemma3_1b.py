r"""Gemma 3 1B from a checkpoint, in bfloat16.

    kvgraft deposit --config=configs/gemma3_1b.py --model=DIR \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma3_1b.py --model=DIR \
        --store=/tmp/store --artifact=manual --continuations=50

DIR is a Hugging Face or Orbax directory or a GGUF file; without the flag it is
./gemma3-1b. Expected of `verify`: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma3-1b --context=32768` says on CPU:
  999,885,952 parameters, 2,000,040,448 bytes of weights;
  26,624 bytes of K and V a token: 22,528 sliding, 4,096 global;
  182,452,224 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma3-1b', 'dtype': 'bfloat16', 'capacity': 32768}
