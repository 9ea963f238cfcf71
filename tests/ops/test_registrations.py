"""Every schema of csrc/library.cpp, whatever was built: its types, and that each has a gradient or refuses one."""

import torch

import torchsparse_rec

NAMES = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("torchsparse_rec::"))
# These operators return no tensor of numbers, so there is nothing to differentiate.
WITHOUT_GRADIENT = {
    f"torchsparse_rec::{name}"
    for name in ("cpu_level", "row_optimizer_rule", "check_errors", "collection_plan", "collection_plan_free")
}


def schema(name: str) -> torch.FunctionSchema:
    """Return the schema that the dispatcher knows."""
    return getattr(torch.ops.torchsparse_rec, name.split("::")[1]).default._schema


def test_the_library_is_the_one_that_is_tested():
    assert torchsparse_rec.cpu_level() and set(NAMES) > WITHOUT_GRADIENT


def test_autograd_is_registered_for_what_is_functional():
    # torch refuses a derivative of an operator that writes into its arguments.
    has = {name for name in NAMES if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd")}
    assert has == {name for name in NAMES if not schema(name).is_mutable} - WITHOUT_GRADIENT


def test_schemas_use_what_the_stable_abi_passes_well():
    lists = {"List[int]", "List[float]", "List[bool]", "List[Tensor]"}
    passed = {"Tensor", "Optional[Tensor]", "int", "Optional[int]", "bool", "float", *lists}
    for name in NAMES:
        types = {str(x.type) for x in (*schema(name).arguments, *schema(name).returns)}
        assert types <= passed, name
