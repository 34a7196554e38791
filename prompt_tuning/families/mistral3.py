"""Mistral Small 3.1 and later, and Ministral 3, with images: reads the text model."""

from prompt_tuning.families import text_part
from prompt_tuning.families.ministral3 import read_ministral3
from prompt_tuning.families.mistral import MISTRAL, read_mistral

MISTRAL3 = text_part.with_images(
    MISTRAL,
    "mistral3",
    "Mistral Small 3.1 and Ministral 3 with images (text model only)",
    {"mistral": read_mistral, "ministral3": read_ministral3},
    tied=True,
    head_name=text_part.STORED_HEAD,
    omits_tied_setting=True,
    unread_parts=("vision_tower", "multi_modal_projector"),
    unread_modules=tuple(
        f"model.vision_tower.transformer.layers.{{}}.{name}_proj"
        for name in (
            *("attention.q", "attention.k", "attention.v", "attention.o"),
            *("feed_forward.gate", "feed_forward.up", "feed_forward.down"),
        )
    ),
    more_inert={
        *("vision_feature_layer", "spatial_merge_size"),
        *("projector_hidden_act", "multimodal_projector_bias"),
    },
)
