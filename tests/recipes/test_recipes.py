"""recipes: each sets what its source fixes, what is told wins and is said, and each of them trains."""

import pytest

import tracegrad as tg
from generate_docs import documented, losses_page
from tracegrad import recipes
from tracegrad.cli import main
from tracegrad.config import Advantage, Config, as_dict, load
from tracegrad.errors import ArgumentError
from tracegrad.objective import override_all, presets
from tracegrad.recipes import Recipe
from tracegrad.recipes.recipe import objective_options

NAMES = [name for name in recipes.__all__ if isinstance(getattr(recipes, name), Recipe)]


@pytest.mark.parametrize("name", NAMES)
def test_the_options_of_a_recipe_give_its_objective_and_its_advantages_back(name):
    recipe = recipes.find(name)
    chosen, otherwise = recipe.resolve()
    assert otherwise == ()
    objective = override_all(presets.find(chosen.objective.preset), dict(chosen.objective.overrides))
    assert objective == recipe.objective
    assert recipe.advantage is None or chosen.advantage == recipe.advantage
    assert str(recipe).startswith(str(objective))
    assert all(f"{option} = " in str(recipe) for option, _ in recipe.options)


def test_a_recipe_sets_nothing_but_what_it_fixes():
    chosen, _ = recipes.DAPO.resolve(
        start=load(overrides=[("optimizer.lr", 3e-5), ("advantage.single_sample_group", "zero")])
    )
    changed = {name: value for name, value in as_dict(chosen).items() if as_dict(Config())[name] != value}
    assert changed == {
        "advantage.scale": "std",
        "filter.drop_zero_std_groups": True,
        "optimizer.lr": 3e-5,
        "advantage.single_sample_group": "zero",
    }


def test_what_is_told_by_hand_or_by_file_wins_and_is_said(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[advantage]\nddof = 0\n[objective]\npreset = "DAPO"\n"surrogate.high" = 0.4\n')
    chosen, otherwise = recipes.DAPO.resolve(file, [("train.epochs", "3")])
    assert (chosen.advantage.scale, chosen.advantage.ddof, chosen.train.epochs) == ("std", 0, 3)
    assert otherwise == ("advantage.ddof = 0 (not 1)", "objective.surrogate.high = 0.4")


def test_another_baseline_leaves_out_what_belonged_to_the_recipes_own():
    chosen, otherwise = recipes.GRPO.resolve(overrides=[("advantage.baseline", "rloo")])
    assert chosen.advantage == Advantage(baseline="rloo")  # a scale would be refused: rloo has none
    assert "advantage.baseline = rloo (not group_mean)" in otherwise


def test_another_objective_leaves_out_what_the_recipe_says_of_missing_logprobs():
    recipe = Recipe(presets.DAPO, missing_logprobs="ratio_one")
    chosen, otherwise = recipe.resolve(overrides=[("objective", "WEIGHTED_SFT")])
    assert (chosen.objective.preset, chosen.train.missing_logprobs) == ("WEIGHTED_SFT", "mask")
    assert otherwise == ("objective = WEIGHTED_SFT (not DAPO)", "train.missing_logprobs = mask (not ratio_one)")


def test_an_objective_without_a_name_goes_through_a_config_as_its_code(tmp_path):
    objective = override_all(presets.VESPO, {"weights.0.transform.power": 1.5})
    recipe = Recipe(objective)
    chosen, _ = recipe.resolve()
    file = tmp_path / "config.toml"
    file.write_text(tg.config.to_toml(chosen))
    assert presets.find(load(file).objective.preset) == objective


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Objective(__import__('os').system('true'))", "TG-OBJ-036"),
        ("Objective(override)", "TG-OBJ-036"),
        ("Objective(with_kl(1, 2))", r"TG-OBJ-036.*with_kl"),
        ("Objective(Clip(0.2, 0.2), **{})", "TG-OBJ-036"),
        ("Objective(" + "(" * 5000, "TG-OBJ-036"),
        ("Objective(Clip(low=7))", r"TG-OBJ-038.*7"),
    ],
)
def test_a_text_that_is_no_objective_is_refused_and_never_executed(text, why):
    with pytest.raises(ArgumentError, match=why):
        presets.find(text)


def test_a_recipe_is_found_by_its_name_or_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    lines = ["import tracegrad as tg", "MINE = tg.recipes.Recipe(tg.presets.GSPO, missing_logprobs='mask')"]
    file.write_text("\n".join(lines))
    assert recipes.find(f"{file}:MINE") == Recipe(presets.GSPO, missing_logprobs="mask")
    with pytest.raises(ArgumentError, match=r"TG-OBJ-027.*Did.*you"):
        recipes.find("GRPPO")
    with pytest.raises(ArgumentError, match=r"TG-RECIPE-001.*ICEPOP"):
        recipes.find("ICEPOP")


def test_what_a_recipe_may_hold_is_checked():
    with pytest.raises(ArgumentError, match=r"TG-CONFIG-001.*lrr"):
        Recipe(presets.GRPO, config=(("optimizer.lrr", 1.0),))
    with pytest.raises(ArgumentError, match="TG-RECIPE-010"):
        Recipe(presets.GRPO, config=(("advantage.scale", "std"),))
    with pytest.raises(ArgumentError, match="TG-OBJ-020"):
        Recipe(presets.GRPO_DIRECT, missing_logprobs="ratio_one")


def test_a_penalty_is_told_by_its_short_spelling():
    assert objective_options(presets.with_beta(presets.GSPO, 0.1)) == (("objective", "GSPO"), ("objective.beta", 0.1))


def test_the_page_lists_every_recipe_with_its_paper():
    told = {name: text for name, _, text in documented(recipes.recipe, Recipe)}
    assert set(told) == set(recipes.recipe.__all__)
    assert all("Paper:" in text and f"\n| {name} | " in losses_page() for name, text in told.items())


def test_the_command_line_says_a_recipe_and_what_was_told_otherwise(capsys, tmp_path):
    arguments = ["train", "t.jsonl", "--model", "m", "--out", str(tmp_path), "--recipe", "GSPO", "--print-config"]
    assert main([*arguments, "--advantage.scale", "none"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        "# recipe   GSPO: objective = GSPO, advantage.baseline = group_mean, advantage.scale = std"
    )
    assert said[1] == "# override these options replace the recipe's: advantage.scale = none (not std)"
    assert 'preset = "GSPO"' in said
    assert main([*arguments[:-2], "GSPPO", "--print-config"]) == 1
    assert "no recipe is called 'GSPPO'" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.first_cases(8)
def test_every_recipe_takes_a_step_on_the_example(example, group, tmp_path, capsys, name):
    pytest.importorskip("transformers")
    places = [str(group), "--model", str(example / "model"), "--out", str(tmp_path)]
    assert main(["train", *places, "--recipe", name, "--data.holdout", "0"]) == 0
    said = capsys.readouterr().out
    assert f"recipe   {name}: " in said
    assert "trained  1 step" in said
    assert "otherwise" not in said
