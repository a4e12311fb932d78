"""What OME-Zarr states about images: pyramids of one image, and plates of wells full of them.

Source: OME-NGFF 0.4 and 0.5, "multiscales", "plate" and "well" metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsprep.core.schema import Attrs
from dsprep.formats.conventions import Stated
from dsprep.formats.ragged import Tree


def state_images(tree: Tree, groups: Mapping[str, Attrs], stated: Stated) -> None:
    """Keep the smaller levels of pyramids aside, and name the images of a plate.

    `groups` are the attributes of each group.
    """
    for group, attrs in groups.items():
        ome = attrs.get("ome", attrs)
        pyramid = _first(ome, "multiscales")
        levels = [f"{group}/{path}".lstrip("/") for path in _paths(pyramid, "datasets")]
        axes = [str(_get(a, "name")) for a in _list(_get(pyramid, "axes"))]
        for level in levels[1:]:
            stated.aside[level] = f"smaller levels of {levels[0]}, the same image"
        if levels and axes:
            stated.axes.setdefault(levels[0], axes[0])
        wells = _paths(_get(ome, "plate"), "wells")
        if wells:
            image = next((p for p in tree.datasets if p.startswith(f"{wells[0]}/")), "A/1/0/0")
            level = image.rpartition("/")[2]
            many = (
                f"this is an OME-Zarr plate of {len(wells)} wells, each image an array of its own"
            )
            fix = f"name these, a sample each: 'PLATE/*/*/*/{level}' --sample-axis none"
            stated.refused = many, fix


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _first(value: Any, key: str) -> Any:
    return next(iter(_list(_get(value, key))), None)


def _paths(value: Any, key: str) -> list[str]:
    """Return the paths that a list of objects gives."""
    every = (_get(item, "path") for item in _list(_get(value, key)))
    return [path.strip("/") for path in every if isinstance(path, str)]
