"""Run a script with its models streamed."""

from horizon_lm.errors import ConfigError, HorizonError
from horizon_lm.integrations.scripts.observing import observing
from horizon_lm.integrations.scripts.script import Script
from horizon_lm.integrations.scripts.streaming import Options, PlanShown, ScriptModels


def run_script(script: Script, options: Options) -> None:
    """Run a script as the main program, with its models streamed.

    Raises:
        HorizonError: the script asks for something that is not supported, at the line that the message begins with.
        ConfigError: the script ended, and no model was streamed.
    """
    models = ScriptModels(script, options)
    try:
        with observing(models):
            script.run()
    except PlanShown:
        return
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        if not models.loaded:  # as after --help
            return
    except HorizonError as error:
        if place := script.place(error):
            error.args = (f"{place}: {error}",)
        raise
    if not models.num_streamed:
        raise ConfigError(
            f"{script.path.name} ended, and no model was streamed: it made no Trainer of transformers, prepared no model with accelerate, "
            "and called none that it had loaded; models that are made without from_pretrained or from_config need one of the first two"
        )
