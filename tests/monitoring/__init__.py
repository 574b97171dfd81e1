"""What watches the server: rules, dashboards, and the page that lists the metrics."""
