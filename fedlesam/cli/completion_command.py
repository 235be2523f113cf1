"""fedlesam completion"""

import click
from click.shell_completion import get_completion_class


@click.command("completion", short_help="print your shell's completion script")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  fedlesam completion bash >> ~/.bashrc
    zsh:   fedlesam completion zsh >> ~/.zshrc
    fish:  fedlesam completion fish > ~/.config/fish/completions/fedlesam.fish
    """
    from fedlesam.cli import cli

    maker = get_completion_class(shell)
    if maker is not None:
        click.echo(maker(cli, {}, "fedlesam", "_FEDLESAM_COMPLETE").source())
