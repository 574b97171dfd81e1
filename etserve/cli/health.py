"""`etserve healthcheck`, for containers and scripts."""

from typing import Annotated

import typer


def healthcheck(
    url: Annotated[str, typer.Option(help="The server's root.")] = "http://127.0.0.1:8000",
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether the process answers, not whether it is ready.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds to wait.")] = 3.0,
) -> None:
    """Exit 0 if the server is ready, 1 if it is not or does not answer."""
    from etserve.cli.remote import checked_url, status_of

    path = "/health/live" if live else "/health/ready"
    status = status_of(checked_url(url) + path, timeout)
    if status == 200:
        typer.echo("live" if live else "ready")
        return
    typer.echo(f"etserve: {url} " + ("does not answer" if status is None else f"answers {status}"), err=True)
    raise typer.Exit(1)
