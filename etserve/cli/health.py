"""`etserve healthcheck`, for containers and scripts."""

from typing import Annotated

import typer


def healthcheck(
    url: Annotated[
        str | None, typer.Option(help="The server's root. Default: this machine, at the port of ETSERVE_PORT or 8000.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether the process answers, not whether it is ready.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds to wait.")] = 3.0,
) -> None:
    """Exit 0 if the server is ready, 1 if it is not or does not answer."""
    from etserve.cli.remote import checked_url, status_of

    root, host = local_server() if url is None else (url, None)
    path = "/health/live" if live else "/health/ready"
    status = status_of(checked_url(root) + path, timeout, host)
    if status == 200:
        typer.echo("live" if live else "ready")
        return
    typer.echo(f"etserve: {root} " + ("does not answer" if status is None else f"answers {status}"), err=True)
    raise typer.Exit(1)


def local_server() -> tuple[str, str | None]:
    """URL and Host name by which a server with this environment is reached from the same machine or container."""
    from etserve.config import load_config

    server = load_config().server
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # noqa: S104 (compared, not bound)
    allowed = [name for name in server.allowed_hosts if name != "*"]
    host = allowed[0] if allowed and "*" not in server.allowed_hosts else None
    return f"http://[{address}]:{server.port}" if ":" in address else f"http://{address}:{server.port}", host
