"""Make the table that ships with the package, and the page of models, from the results of a census."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import transformers

# A type is proven if all of these cases are right, because together they cover training with the default settings.
NEEDED = ("whole", "default", "accumulation", "evaluation", "adamw", "update_in_backward", "save", "default_precision")
FEATURES = {  # the case that proves each feature
    "micro_batches": ("micro_batches", "default_micro_batches"),
    "hidden_states": ("hidden_states",),
    "generate": ("generate",),
    "varlen": ("varlen",),
    "other_tie": ("other_tie",),
    "auxiliary_loss": ("auxiliary_loss",),
    "shared_state": ("shared_state",),
    "images": ("images", "default_images"),
    "several_images": ("several_images",),
    "mixed_images": ("mixed_images",),
    "frozen_tower": ("frozen_tower", "tower_alone"),
    "image_training": ("image_accumulation", "image_evaluation", "image_adamw", "image_save"),
    "images_in_micro_batches": ("images_in_micro_batches",),
}
FOR_IMAGES = (
    "images", "several_images", "mixed_images", "frozen_tower", "image_training", "images_in_micro_batches",
)  # fmt: skip
GOOD = ("right", "close")

Result = Mapping[str, Any]  # the result of one model type, as returned by `tests.census.runner`


def is_right(result: Result, *cases: str) -> bool:
    return all(result["cases"].get(case, {}).get("status") in GOOD for case in cases)


def is_proven(result: Result) -> bool:
    return result["status"] == "built" and is_right(result, *NEEDED)


def features(result: Result) -> list[str]:
    """Return the proven features of a model type, in addition to `NEEDED`."""
    return [name for name, cases in FEATURES.items() if is_right(result, *cases)]


def entry(result: Result) -> dict[str, Any]:
    """Return the entry of a proven model type."""
    found = features(result)
    ties = {"tied" if result["tied"] else "untied"}
    if "other_tie" in found:
        found.remove("other_tie")
        ties = {"tied", "untied"}
    head = result["cases"]["default"]["detail"].partition(":")[0]
    return {"class": result["class"], "head": head, "features": sorted(ties) + found}


def table(results: Mapping[str, Mapping[str, Result]]) -> dict[str, Any]:
    """Return the table of proven model types, keyed by the type in the model's config; classifiers apart."""
    types: dict[str, dict[str, Any]] = {}
    for mapping in ("causal", "image_text"):
        for result in results.get(mapping, {}).values():
            if is_proven(result):
                new = entry(result)
                old = types.setdefault(result["model_type"], new)
                if old["class"] == new["class"] and len(new["features"]) > len(old["features"]):
                    types[result["model_type"]] = new  # with images, which are not tried with the other mapping
    found = results.get("classification", {}).values()
    classifiers = {result["model_type"]: entry(result) for result in found if is_proven(result)}
    return {
        "transformers": transformers.__version__,
        "types": dict(sorted(types.items())),
        "classifiers": dict(sorted(classifiers.items())),
    }


VERDICTS = {"wrong": "wrong", "crashed": "fails", "rejected": "rejected", "plain_fails": "not tried"}  # worst first


def verdict(result: Result) -> tuple[str, str]:
    """Return the outcome of a type (right, wrong, fails, rejected, not tried), and the reason unless it is right."""
    if result["status"] != "built":
        return "not tried", f"no tiny model can be built: {one_line(result['detail'])}"
    if is_proven(result):
        return "right", ""
    for status, word in VERDICTS.items():
        for case in NEEDED:
            outcome = result["cases"].get(case, {"status": "", "detail": ""})
            if outcome["status"] == status:
                said = one_line(outcome["detail"])
                if status == "rejected":
                    return word, said.partition(": ")[2]  # without the name of the exception
                before = "plain Hugging Face cannot train it on text" if status == "plain_fails" else case
                return word, f"{before}: {said}"
    return "rejected", "not in the table: only a loss and its gradients were compared"


def reason_without_images(result: Result) -> str:
    """Return the reason why a proven type is not proven with images; empty if it is."""
    for case in FEATURES["images"]:
        outcome = result["cases"].get(case, {"status": "no_such_case", "detail": "not tried"})
        if outcome["status"] not in GOOD:
            said = one_line(outcome["detail"])
            return said.partition(": ")[2] if outcome["status"] == "rejected" else said
    return ""


def count(results: Mapping[str, Result]) -> Counter[str]:
    """Return the number of types of a mapping for each verdict."""
    return Counter(verdict(result)[0] for result in results.values())


def one_line(text: str) -> str:
    """Return the beginning of a message, formatted for a table cell."""
    short = " ".join(text.split()).replace("|", "/")
    return short if len(short) < 240 else short[:240].rpartition(" ")[0] + " ..."
