"""A temperature that becomes part of a network."""

import pytest
import torch
from torch import nn

from segcal.heads import add_probability_head, output_of
from segcal.posthoc.folding import FoldingError, fitted_temperature, fold_temperature
from segcal.posthoc.temperature import Temperature
from tests.conftest import close

K = 3


def fitted(logits, labels, **options):
    return Temperature(**options).fit(logits, labels)


def images(seed=0):
    return torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(seed))


def labels_of(logits, seed=1):
    """Drawn from the softmax of half the logits, so that their temperature is 2."""
    drawn = torch.Generator().manual_seed(seed)
    noise = torch.empty_like(logits).exponential_(generator=drawn)
    return (logits.detach() / 2 - noise.log()).argmax(1)


LAST = {
    "convolution": lambda: nn.Conv2d(8, K, 1),
    "without bias": lambda: nn.Conv2d(8, K, 3, padding=1, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(8, K, 3, padding=1),
}


@pytest.mark.parametrize("last", LAST)
def test_logits_are_divided(last):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), LAST[last]())
    x = images()
    before = 20 * network(x).detach()
    with torch.no_grad():
        for one in network[2].parameters():
            one *= 20
    temperature = fitted_temperature([(before, labels_of(before))], 1)
    assert temperature.value == pytest.approx(2, rel=0.2)
    (value,) = fold_temperature(network, temperature, lambda: network(x))
    assert value == temperature.value
    after = network(x).detach()
    close(after, before / value, rtol=1e-4, atol=1e-5)
    assert torch.equal(after.argmax(1), before.argmax(1))
    close(torch.softmax(after, 1), temperature.apply(before), rtol=1e-4, atol=1e-5)
    # of the divided logits it is 1: what is done twice is done once
    again = fitted_temperature([(after, labels_of(before))], 1)
    assert again.value == pytest.approx(1, abs=1e-4)


def test_regions_have_a_temperature_each():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, K, 1))
    x = images()
    scale = torch.tensor([4.0, 20.0, 60.0]).view(1, K, 1, 1)
    with torch.no_grad():
        network[2].weight *= scale.view(K, 1, 1, 1)
        network[2].bias *= scale.flatten()
    before = network(x).detach()
    noise = torch.rand(before.shape, generator=torch.Generator().manual_seed(2))
    labels = (torch.sigmoid(before / scale) > noise).long()
    temperature = fitted_temperature([(before, labels)], 1, per_channel=True)
    values = fold_temperature(network, temperature, lambda: network(x))
    assert values == [one.value for one in temperature.channels]
    assert values[0] < values[1] < values[2]
    close(network(x).detach(), before / torch.tensor(values).view(1, K, 1, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("built", [True, False], ids=["built with 2 K channels", "added"])
def test_of_two_heads_the_probability_s_is_divided(built):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2 * K if built else K, 1)
    )
    if not built:
        add_probability_head(network, K)
    x = images()

    def probability():
        with output_of(network, "both"):
            return network(x).chunk(2, 1)[1]

    before = network(x).detach()
    temperature = Temperature.from_state(
        {**fitted(before[:, K:], labels_of(before[:, K:])).state(), "learned": {"value": 3.0}}
    )
    fold_temperature(network, temperature, probability, num_heads=1 + built)
    after = network(x).detach()
    close(after[:, :K], before[:, :K], rtol=0, atol=0)
    close(after[:, K:], before[:, K:] / 3, rtol=1e-5, atol=1e-6)


class Residual(nn.Module):
    """A network whose output is a sum, so that no single layer makes it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, K, 1), nn.Conv2d(K, K, 1)

    def forward(self, x):
        x = self.first(x)
        return x + self.last(x)


def test_a_network_without_a_last_layer_is_left_alone():
    torch.manual_seed(0)
    network, x = Residual(), images()
    before = 20 * network(x).detach()
    temperature = fitted(before, labels_of(before))
    kept = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(FoldingError, match="do not come from one last layer"):
        fold_temperature(network, temperature, lambda: network(x))
    for name, value in network.state_dict().items():
        assert torch.equal(value, kept[name])
    with pytest.raises(FoldingError, match="holds no layer with 6 output channels"):
        fold_temperature(network, temperature, lambda: network(x), num_heads=2)


def test_what_tells_no_temperature_is_not_taken():
    network, x = nn.Sequential(nn.Conv2d(1, K, 1)), images()
    logits = network(x).detach()
    separable = fitted_temperature([(logits, logits.argmax(1))], 1)
    with pytest.raises(FoldingError, match="is at the bound of the search"):
        fold_temperature(network, separable, lambda: network(x))
    with pytest.raises(ValueError, match="not fitted yet"):
        fold_temperature(network, Temperature(), lambda: network(x))
    with pytest.raises(ValueError, match="at least one voxel that is not ignored"):
        fitted_temperature([(logits, torch.full((2, 12, 12), 255))], 1, ignore_index=255)
