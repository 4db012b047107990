r"""Gemma 4 31B from a checkpoint, in bfloat16.

    kvgraft deposit --config=configs/gemma4_31b.py --model=DIR \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma4_31b.py --model=DIR \
        --store=/tmp/store --artifact=manual --continuations=50

DIR is a Hugging Face or Orbax directory or a GGUF file; without the flag it is
./gemma4-31b. Expected of `verify`: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma4-31b --context=32768` says on CPU:
  30,697,345,340 parameters, 61,397,353,712 bytes of weights;
  901,120 bytes of K and V a token: 819,200 sliding, 81,920 global;
  7,465,861,120 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma4-31b', 'dtype': 'bfloat16', 'capacity': 32768}
