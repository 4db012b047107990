"""Profile and class: everything that may fix the bits, as values."""
import dataclasses
@dataclasses.dataclass(frozen=True)
class Profile:
  dtype: str
  chunk: int
  tile: int
  page: int
  unroll_heads: bool = True
