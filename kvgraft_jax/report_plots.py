"""Plots of a report, as SVG elements for an HTML page.

They scale, take the page's text colour, name no font and no address, and have
the same bytes whenever their values are the same. matplotlib is the extra
`plots`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import io
import math
import re
from typing import Any
import unicodedata
import warnings
import xml.etree.ElementTree as ET

from kvgraft_jax import errors

# Of bfloat16, float32 and float64, as powers of two.
ROUNDOFF = {'bfloat16': -8, 'float32': -24, 'float64': -53}

# Okabe and Ito's palette, which the colour-blind can tell apart, but for the
# yellow, which is too pale on white. Shapes differ as well.
_COLOURS = ('#d55e00', '#0072b2', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')
_MARKERS = ('o', '^', 's', 'D', 'v', 'P')
_GREY = '#888888'
_WIDTH = 4.2  # Inches: with 10 points, legible where a phone is as wide.
_SUPERSCRIPTS = str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹')

Points = Mapping[int, float]  # By offset.


def kl_by_offset(
    case: str, series: Mapping[tuple[str, str], Points], base: Points,
    prefix: str,
) -> str:
  """Returns KL against the offset, log-log, with a band for zero.

  Args:
    case: the plot's title.
    series: (what is compared, statistic) -> offset in tokens -> KL in nats.
    base: what another case gave, drawn in grey for comparison; may be empty.
    prefix: of the ids in the SVG, unique in the page.
  """
  def draw(axes: Any) -> None:
    offsets = sorted({m for s in series.values() for m in s if m > 0})
    place = _log_scale(
        axes, 'y', [v for p in (base, *series.values()) for v in p.values()],
        band=True)
    _offset_scale(axes, offsets)
    axes.set_title(_label(case), loc='left', fontsize=10, fontweight='bold')
    axes.set_ylabel('KL of a row (nats)')
    if base:
      _line(axes, base, place, color=_GREY, linestyle=':', label='base, moved')
    for (what, statistic), points in series.items():
      style = _style(what, [w for w, _ in series])
      if statistic == 'median':
        style |= {'label': _label(what)}
      else:
        style |= {'linestyle': '--', 'markerfacecolor': 'none'}
      _line(axes, points, place, **style)

  return _plot(draw, 3.3, prefix)


def overview(
    title: str, dtypes: Mapping[str, Mapping[str, Points]], prefix: str,
) -> str:
  """Returns one row of points a case, by dtype: its KL at every offset.

  Args:
    title: of the plot.
    dtypes: dtype -> case -> offset in tokens -> KL in nats.
    prefix: of the ids in the SVG, unique in the page.
  """
  rows: list[tuple[str, Points | None]] = []  # None heads those of a dtype.
  for dtype, cases in dtypes.items():
    rows += [(dtype or 'other', None), *cases.items()]
  found = [points for _, points in rows if points]

  def draw(axes: Any) -> None:
    place = _log_scale(
        axes, 'x', [v for p in found for v in p.values()], band=True)
    axes.set_title(title, loc='left', fontsize=10, fontweight='bold')
    axes.set_xlabel('KL of a row, median over rows (nats)')
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [_label(name) for name, _ in rows])
    for tick, (_, points) in zip(axes.get_yticklabels(), rows):
      if points is None:
        tick.set_fontweight('bold')
    offsets = sorted({m for p in found for m in p})
    for i, m in enumerate(offsets):
      spots = [(place(p[m]), y) for y, (_, p) in enumerate(rows)
               if p and m in p and place(p[m]) is not None]
      if spots:
        # Side by side where values are alike.
        shift = 0.7 * ((i + 0.5) / len(offsets) - 0.5)
        axes.plot([x for x, _ in spots], [y + shift for _, y in spots],
                  color=_colour(i), marker=_marker(i), linestyle='',
                  label=f'M = {m:,}')

  return _plot(draw, 1.9 + 0.4 * len(rows), prefix)


def rounding(
    series: Mapping[str, Mapping[str, Sequence[float]]], power: int,
    quantity: str, prefix: str,
) -> str:
  """Returns a quantity against the unit roundoff, with the predicted slope.

  Args:
    series: what is compared -> dtype of `ROUNDOFF` -> values, one an offset.
    power: the quantity is predicted to grow with this power of the roundoff.
    quantity: label of the axis, with its unit.
    prefix: of the ids in the SVG, unique in the page.
  """
  def draw(axes: Any) -> None:
    dtypes = [d for d in ROUNDOFF if any(d in s for s in series.values())]
    place = _log_scale(
        axes, 'y', [v for s in series.values() for d in s for v in s[d]])
    axes.set_xlim(min(ROUNDOFF[d] for d in dtypes) - 5,
                  max(ROUNDOFF[d] for d in dtypes) + 5)
    axes.set_xticks(
        [ROUNDOFF[d] for d in dtypes],
        [f'2{str(ROUNDOFF[d]).translate(_SUPERSCRIPTS)}\n{d}' for d in dtypes])
    axes.set_xlabel('unit roundoff u (relative to 1)')
    axes.set_ylabel(quantity)
    bottom, top = axes.get_ylim()
    for i, (what, values) in enumerate(series.items()):
      shift = 0.8 * i - 0.4 * (len(series) - 1)
      style = _style(what, list(series))
      label: str | None = what
      for dtype in dtypes:
        ys = [y for y in map(place, values.get(dtype, ())) if y is not None]
        if not ys:
          continue
        x, middle = ROUNDOFF[dtype] + shift, place(median(values[dtype]))
        axes.plot([x, x], [min(ys), max(ys)], color=style['color'], linewidth=2)
        axes.plot([x], [middle], **style, linestyle='', label=label)
        label = None  # Once in the legend.
      anchor = next((d for d in dtypes if d in values), dtypes[0])
      start = median(values.get(anchor) or [0])
      if start > 0:
        ends = [ROUNDOFF[d] for d in dtypes]
        xs = [min(ends) - 3, max(ends) + 3]
        axes.plot(
            [x + shift for x in xs],
            [start * 2.0 ** (power * (x - ROUNDOFF[anchor])) for x in xs],
            color=style['color'], linestyle=':', label=f'{what}: predicted')
    axes.set_ylim(bottom, top)

  return _plot(draw, 3.4, prefix)


def median(values: Sequence[float]) -> float:
  """Returns the middle value, or the mean of the middle two."""
  ranked, half = sorted(values), len(values) // 2
  return ranked[half] if len(ranked) % 2 else (
      ranked[half - 1] + ranked[half]) / 2


def _style(what: str, all_of_them: list[str]) -> dict[str, Any]:
  """Returns colour and marker: the same in every plot for known names."""
  known = ['moved', 'fresh', 'own']
  i = list(dict.fromkeys(known + all_of_them)).index(what)
  # Smaller ones above larger ones, so that equal values are all seen.
  return {'color': _colour(i), 'marker': _marker(i), 'zorder': 3 - 0.1 * i,
          'markersize': 4.5 + 1.8 * i}


def _colour(i: int) -> str:
  return _COLOURS[i % len(_COLOURS)]


def _marker(i: int) -> str:
  return _MARKERS[i % len(_MARKERS)]


def _label(text: str, limit: int = 16) -> str:
  """Returns a text of the ledger as one short line that SVG may hold."""
  kept = ' '.join(''.join(
      c if unicodedata.category(c)[0] != 'C' else ' ' for c in text).split())
  return kept if len(kept) <= limit else kept[:limit - 1] + '…'


def _line(
    axes: Any, points: Points, place: Callable[[float], float | None],
    **style: Any,
) -> None:
  placed = [(m, place(v)) for m, v in sorted(points.items()) if m > 0]
  placed = [(m, y) for m, y in placed if y is not None]
  if placed:
    axes.plot(*zip(*placed), **style)


def _decade(exponent: int, times: int = 1) -> str:
  return f'{times}e{exponent}' if exponent else f'{times}'


def _log_scale(
    axes: Any, which: str, values: Iterable[float], band: bool = False,
) -> Callable[[float], float | None]:
  """Gives an axis decades and, for zeros, a band below them.

  Args:
    axes: of matplotlib.
    which: 'x' or 'y'.
    values: all that the axis has to show.
    band: show the band even if no value is zero.

  Returns:
    Where to place a value; None for a negative one, which has no place.
  """
  values = list(values)
  logs = [math.log10(v) for v in values if v > 0] or [-1, 0]
  low, high = math.floor(min(logs)), math.ceil(max(logs))
  high = max(high, low + 1)
  step = math.ceil((high - low) / 5)
  exponents = list(range(high, low - 1, -step))
  ticks = [10.0 ** e for e in exponents]
  names = [_decade(e) for e in exponents]
  if high == low + 1 and which == 'y':
    ticks += [2 * 10.0 ** low, 5 * 10.0 ** low]
    names += [_decade(low, 2), _decade(low, 5)]
  # The band's height follows the span, so that its label keeps its distance.
  room = (high - low) / 10
  first, zero = 10.0 ** (low - room / 2), 10.0 ** (low - 1.6 * room)
  last = 10.0 ** (high + room / 2)
  band = band or 0 in values
  if band:
    first = 10.0 ** (low - 2.2 * room)
    span = axes.axhspan if which == 'y' else axes.axvspan
    span(first, 10.0 ** (low - room), color=_GREY, alpha=0.25, linewidth=0)
    ticks, names = [*ticks, zero], [*names, '0 (equal)']
  if which == 'y':
    axes.set(yscale='log', ylim=(first, last))
    axes.set_yticks(ticks, names)
  else:
    axes.set(xscale='log', xlim=(first, last))
    # Stands where a decade's label would be too close.
    axes.set_xticks(ticks, [n.replace(' ', '\n') for n in names])
  return lambda v: v if v > 0 else zero if v == 0 else None


def _offset_scale(axes: Any, offsets: list[int]) -> None:
  """Gives the x axis the offsets as ticks, labelled where there is room."""
  axes.set_xscale('log')
  axes.set_xlabel('offset M (tokens)')
  if not offsets:
    return
  low, high = offsets[0] / 1.5, offsets[-1] * 1.5
  axes.set_xlim(low, high)
  names, last = [], -math.inf
  for m in offsets:
    at = math.log(m / low) / math.log(high / low)
    names.append(f'{m:,}' if at - last > 0.12 else '')
    last = at if names[-1] else last
  axes.set_xticks(offsets, names)


def _plot(draw: Callable[[Any], None], height: float, prefix: str) -> str:
  """Returns the SVG element of a figure with one pair of axes."""
  try:
    import matplotlib
    from matplotlib import figure as figure_lib
    from matplotlib import ticker
  except ImportError:
    raise errors.MissingDependencyError(
        'report: the package that draws its plots is not installed: pip'
        " install 'matplotlib>=3.9,<4' (the extra `plots`)") from None
  with matplotlib.rc_context(), warnings.catch_warnings():
    # A letter that the font lacks is the browser's to find.
    warnings.filterwarnings('ignore', 'Glyph .* missing from font')
    matplotlib.rcdefaults()
    matplotlib.rcParams.update({
        'svg.fonttype': 'none', 'svg.hashsalt': 'kvgraft',
        'text.parse_math': False, 'font.size': 10, 'font.family': 'DejaVu Sans',
        'lines.markersize': 5.5, 'lines.linewidth': 1.4,
        'axes.grid': True, 'grid.color': _GREY, 'grid.alpha': 0.35,
        'grid.linewidth': 0.6, 'axes.spines.top': False,
        'axes.spines.right': False, 'legend.frameon': False,
        'legend.fontsize': 9,
    })
    figure = figure_lib.Figure(figsize=(_WIDTH, height), layout='constrained')
    axes = figure.add_subplot()
    draw(axes)
    for axis in (axes.xaxis, axes.yaxis):
      axis.set_minor_locator(ticker.NullLocator())
    if axes.get_legend_handles_labels()[0]:
      figure.legend(loc='outside lower center', ncols=2, handlelength=2.2,
                    columnspacing=1.2, borderpad=0.1)
    buffer = io.StringIO()
    figure.savefig(buffer, format='svg', transparent=True, metadata={
        'Date': None, 'Creator': None, 'Format': None, 'Type': None})
  return _element(buffer.getvalue(), prefix)


def _element(svg: str, prefix: str) -> str:
  """Returns a stand-alone SVG as an element of a page with other ones."""
  root = ET.fromstring(svg)
  for parent in list(root.iter()):
    for child in list(parent):
      if child.tag.rpartition('}')[2] in ('metadata', 'style'):
        parent.remove(child)
  for node in root.iter():
    node.tag = node.tag.rpartition('}')[2]
    found = {name.rpartition('}')[2]: value
             for name, value in node.attrib.items()}
    node.attrib.clear()
    for name, value in found.items():
      if name == 'id':
        value = f'{prefix}-{value}'
      elif name == 'href':
        value = f'#{prefix}-{value[1:]}'
      value = value.replace('url(#', f'url(#{prefix}-')
      if name == 'style':
        value = re.sub('font-family: [^;]*;? ?', '', value)
        value = value.replace('#000000', 'currentColor')
      node.set(name, value)
  for name in ('width', 'height', 'version'):
    root.attrib.pop(name, None)
  return ET.tostring(root, encoding='unicode')
