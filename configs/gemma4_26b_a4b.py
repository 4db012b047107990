r"""Gemma 4 26B-A4B from a checkpoint, in bfloat16.

    kvgraft deposit --config=configs/gemma4_26b_a4b.py --model=DIR \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma4_26b_a4b.py --model=DIR \
        --store=/tmp/store --artifact=manual --continuations=50

DIR is a Hugging Face or Orbax directory or a GGUF file; without the flag it is
./gemma4-26b-a4b. Expected of `verify`: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma4-26b-a4b --context=32768` says on CPU:
  25,233,141,790 parameters, 50,467,684,472 bytes of weights;
  225,280 bytes of K and V a token: 204,800 sliding, 20,480 global;
  1,866,465,280 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma4-26b-a4b', 'dtype': 'bfloat16', 'capacity': 32768}
