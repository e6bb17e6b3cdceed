"""The models of the end-to-end tests serve here too."""

from tests.e2e.conftest import endless_model, random_model, speaking_model

__all__ = ["endless_model", "random_model", "speaking_model"]
