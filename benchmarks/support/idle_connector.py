"""A connector that claims, loads and saves nothing, to measure vLLM's own cost of having one."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base


class IdleConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """The connector of both roles."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return base.KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    request_finished_all_groups = request_finished

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to load, save or wait for."""

    update_state_after_alloc = _do_nothing
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing
