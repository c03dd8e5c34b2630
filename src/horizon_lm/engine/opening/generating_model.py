"""A streamed model that generates, in device memory that is known to suffice before the first token."""

from typing import Any

from horizon_lm.engine.opening.streamed_model import StreamedModel
from horizon_lm.errors import StreamingError
from horizon_lm.model.generation import generation_of


class GeneratingModel(StreamedModel):
    """The class that `attach` mixes into the class of a model with a method ``generate``."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, in device memory that is known to suffice before the first token is computed.

        Resident blocks that leave no room for the key-value cache are given up for the time of the call. Of several ranks, those
        whose answers are finished compute further passes with the others.

        Raises:
            DeviceMemoryError: the key-value cache does not fit on the device.
            StreamingError: ``assistant_early_exit`` is set.
        """
        if self._horizon.engine.mesh.size > 1:
            kwargs["synced_gpus"] = True  # otherwise a finished answer would go on to grow
        with self._horizon.generation.call():
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:  # fmt: skip
        """Make the cache as transformers does, which allocates it later, and make room for it on the device.

        Raises:
            StreamingError: the call computes some of the blocks alone.
        """
        if getattr(generation_config, "assistant_early_exit", None) is not None:
            raise StreamingError(
                "assistant_early_exit drafts with the first blocks alone, but a streamed model computes all of them in a pass; "
                "draft with assistant_model or prompt_lookup_num_tokens"
            )
        super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        sequences_and_cache = generation_of(generation_config, model_kwargs, batch_size, max_cache_length)
        if sequences_and_cache is not None:  # otherwise the bytes of the cache are not known
            self._horizon.generation.reserve(*sequences_and_cache)

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Leave images to the pass that computes the prompt; transformers computes them before it, where no weights are on the device."""
        return model_kwargs

    def _has_unfinished_sequences(self, this_peer_finished: bool, synced_gpus: bool, device: Any) -> bool:
        """Return whether the answers of any rank are not finished: all ranks compute each pass together."""
        return any(self._horizon.engine.mesh.exchange("the next token of answers", not this_peer_finished))
