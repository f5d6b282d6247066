"""`KintsugiConnector`, the class that vLLM loads by name.

It blends if vLLM has every name that blending needs; otherwise it declines every blend. Importing this module
succeeds on every vLLM that has connectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.logger import init_logger

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.request import PARAMS_KEY
from kintsugi.engine.worker.hooks import describe_missing

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)

_BASES = tuple(getattr(base, name) for name in ("KVConnectorBase_V1", "SupportsHMA") if hasattr(base, name))


class DecliningConnector(*_BASES):  # type: ignore[misc]
    """The connector for a vLLM that lacks names that blending needs: every prompt is prefilled in full, and
    responses state the reason. Claims, loads and saves nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reason = describe_missing()
        logger.error("Blending is off, every prompt is prefilled in full: %s", self._reason)

    # Scheduler role

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing: nothing was claimed."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return base.KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if not isinstance(params, dict) or PARAMS_KEY not in params:
            return False, None
        return False, {PARAMS_KEY: Accounting(Outcome.DECLINED, reason=self._reason).to_mapping()}

    request_finished_all_groups = request_finished

    # Worker role

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to load, to save or to wait for."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing


def _connector_class() -> Any:
    if describe_missing() is not None:
        return DecliningConnector
    from kintsugi.engine.blending_connector import BlendingConnector

    return BlendingConnector


KintsugiConnector = _connector_class()
