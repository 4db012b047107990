r"""Gemma 3 4B from a checkpoint, in bfloat16.

    kvgraft deposit --config=configs/gemma3_4b.py --model=DIR \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma3_4b.py --model=DIR \
        --store=/tmp/store --artifact=manual --continuations=50

DIR is a Hugging Face or Orbax directory or a GGUF file; without the flag it is
./gemma3-4b. Expected of `verify`: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma3-4b --context=32768` says on CPU:
  3,880,099,328 parameters, 7,760,934,912 bytes of weights;
  139,264 bytes of K and V a token: 118,784 sliding, 20,480 global;
  1,646,264,320 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma3-4b', 'dtype': 'bfloat16', 'capacity': 32768}
