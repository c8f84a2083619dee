import pandas as pd
import torch

from tests.alike import TABLES, differences

NAN = float("nan")


def test_differences_are_found():
    x = {"a": [torch.ones(2), NAN, (1, "b"), 1.0]}

    def other(tensor=None, nan=NAN, one=1, number=1.0):
        return {"a": [torch.ones(2) if tensor is None else tensor, nan, (one, "b"), number]}

    assert not differences(x, other())
    assert differences(x, other(one=2)) == ["/a/2/0: 1, 2"]
    assert differences(x, other(nan=0.0)) == ["/a/1: nan, 0.0"]
    assert differences(x, other(torch.ones(2).double())) == ["/a/0"]
    assert differences(x, other(torch.ones(3))) == ["/a/0"]
    assert not differences(x, other(torch.tensor([1, 1 + 1e-6])))
    assert differences(x, other(torch.tensor([1, 1 + 1e-2]))) == ["/a/0"]
    assert not differences(x, other(number=1 - 1e-6))
    assert differences(x, other(number=1 - 1e-2)) == ["/a/3: 1.0, 0.99"]
    assert differences(x, other(number=1)) == ["/a/3: 1.0, 1"]
    assert len(differences(x, {"b": 1})) == 1
    assert len(differences(x, {"a": []})) == 1


def test_tables():
    table = pd.DataFrame({"case": ["a", "b"], "dsc": [0.5, NAN]})
    assert not differences(table, table.assign(dsc=[0.5004, NAN]), **TABLES)
    assert differences(table, table.assign(dsc=[0.52, NAN]), **TABLES) == ["/dsc/0: 0.5, 0.52"]
    assert differences(table, table.assign(case=["a", "c"]), **TABLES) == ["/case/1: 'b', 'c'"]
    assert len(differences(table, table[:1])) == 2
