r"""Gemma 3 27B from a checkpoint, in bfloat16.

    kvgraft deposit --config=configs/gemma3_27b.py --model=DIR \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma3_27b.py --model=DIR \
        --store=/tmp/store --artifact=manual --continuations=50

DIR is a Hugging Face or Orbax directory or a GGUF file; without the flag it is
./gemma3-27b. Expected of `verify`: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma3-27b --context=32768` says on CPU:
  27,009,002,240 parameters, 54,020,713,472 bytes of weights;
  507,904 bytes of K and V a token: 425,984 sliding, 81,920 global;
  6,459,228,160 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma3-27b', 'dtype': 'bfloat16', 'capacity': 32768}
