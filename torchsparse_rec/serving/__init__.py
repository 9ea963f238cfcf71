"""Serve a model from a folder that many processes map, and that a trainer publishes new versions in."""

from ._folder import ServedModel as ServedModel
from ._folder import load_for_serving as load_for_serving
from ._folder import save_for_serving as save_for_serving

__all__ = ["ServedModel", "load_for_serving", "save_for_serving"]
