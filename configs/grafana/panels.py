"""Builds panels and dashboards in one manner: unit, legend, description. Knows no metric."""

from collections.abc import Sequence

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
    xychart,
)
from grafana_foundation_sdk.cog import builder as cog
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models import prometheus as query
from grafana_foundation_sdk.models import xychart as xy

Query = tuple[str, str]  # expression, legend
Panel = cog.Builder[model.Panel]
Section = tuple[str, Sequence[Panel]]

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
UP: list[model.ValueMapping] = [model.ValueMap(options={
    "0": model.ValueMappingResult(text="not ready", color="red"),
    "1": model.ValueMappingResult(text="ready", color="green"),
})]  # fmt: skip


def stat_panel(
    title: str, description: str, expr: str, unit: str, *, steps: Sequence[tuple[float, str]] = (), decimals: int = 2
) -> Panel:
    """One number with its recent course; `steps` are (from, colour)."""
    panel = stat.Panel().title(title).description(description).datasource(SOURCE).span(4).height(4)
    panel = panel.unit(unit).decimals(decimals).no_value("-").thresholds(_thresholds(steps))
    panel = panel.color_mode(kinds.BigValueColorMode.VALUE).graph_mode(kinds.BigValueGraphMode.AREA)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return panel.with_target(_target(expr, title, "A"))


def lines(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    stacked: bool = False,
    limit: float | None = None,
    maximum: float | None = None,
    right_axis: tuple[str, str] | None = None,
) -> Panel:
    """Lines over time. `limit` draws a threshold, `right_axis` moves one (legend, unit) to an axis of its own."""
    panel = timeseries.Panel().title(title).description(description).datasource(SOURCE).span(8).height(8)
    panel = panel.unit(unit).min(0).no_value("no data: nothing ran, or the feature is off")
    panel = panel.line_width(1).fill_opacity(30 if stacked else 8).show_points(kinds.VisibilityMode.NEVER)
    panel = panel.legend(_legend()).tooltip(_tooltip())
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    if maximum is not None:
        panel = panel.max(maximum)
    if limit is not None:
        style = common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds(_thresholds([(limit, "red")])).thresholds_style(style)
    if right_axis is not None:
        legend, axis_unit = right_axis
        moved = [model.DynamicConfigValue("unit", axis_unit), model.DynamicConfigValue("custom.axisPlacement", "right")]
        panel = panel.override_by_name(legend, moved)
    return _with_targets(panel, queries)


def heat_panel(title: str, description: str, expr: str, unit: str) -> Panel:
    """How a histogram's observations are spread, over time; `expr` keeps the label le."""
    panel = heatmap.Panel().title(title).description(description).datasource(SOURCE).span(8).height(8)
    color = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Spectral").steps(64).reverse(True)
    panel = panel.unit(unit).calculate(False).color(color).cell_gap(1).show_legend().show_y_histogram()
    panel = panel.mode(kinds.TooltipDisplayMode.SINGLE).show_color_scale(True)
    panel = panel.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(kinds.AxisPlacement.LEFT))
    panel = panel.cell_values(heatmap.CellValues().unit("short").decimals(0))
    panel = panel.filter_values(heatmap.FilterValueRange().le(1e-9))
    panel = panel.rows_frame(heatmap.RowsHeatmapOptions().layout(kinds.HeatmapCellLayout.AUTO))
    return panel.with_target(_target(expr, "{{le}}", "A").format(query.PromQueryFormat.HEATMAP))


def bars(title: str, description: str, expr: str, legend: str, unit: str) -> Panel:
    """Present values side by side."""
    panel = bargauge.Panel().title(title).description(description).datasource(SOURCE).span(8).height(8)
    panel = panel.unit(unit).min(0).no_value("-").orientation(kinds.VizOrientation.HORIZONTAL)
    panel = panel.display_mode(kinds.BarGaugeDisplayMode.GRADIENT).show_unfilled(True)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return panel.with_target(_target(expr, legend, "A"))


def ready_timeline(title: str, description: str, expr: str, legend: str) -> Panel:
    """When a 0/1 series was which."""
    panel = statetimeline.Panel().title(title).description(description).datasource(SOURCE).span(8).height(8)
    panel = panel.unit("short").mappings(UP).show_value(kinds.VisibilityMode.AUTO).merge_values(True)
    return panel.with_target(_target(expr, legend, "A"))


def table_panel(title: str, description: str, expr: str, hidden: Sequence[str]) -> Panel:
    """The labels of a series as rows, without the columns `hidden`."""
    panel = table.Panel().title(title).description(description).datasource(SOURCE).span(24).height(8)
    options = {"excludeByName": dict.fromkeys(hidden, True)}
    panel = panel.unit("string").with_transformation(model.DataTransformerConfig(id_val="organize", options=options))
    return panel.with_target(
        prometheus.Dataquery().expr(expr).instant().ref_id("A").format(query.PromQueryFormat.TABLE)
    )


def scatter(title: str, description: str, x: Query, y: Query, units: tuple[str, str]) -> Panel:
    """One point per moment: y against x."""
    panel = xychart.Panel().title(title).description(description).datasource(SOURCE).span(8).height(8)
    panel = panel.unit(units[1]).override_by_name(x[1], [model.DynamicConfigValue("unit", units[0])])
    panel = panel.show(xy.XYShowMode.POINTS).point_size(xychart.XychartFieldConfigPointSize().fixed(4))
    one = xychart.XYSeriesConfig().name(xychart.XychartXYSeriesConfigName().fixed(f"{y[1]} against {x[1]}"))
    one = one.frame(xychart.XychartXYSeriesConfigFrame().matcher(xychart.MatcherConfig().id("byIndex").options(0)))
    one = one.x(xychart.XychartXYSeriesConfigX().matcher(xychart.MatcherConfig().id("byName").options(x[1])))
    one = one.y(xychart.XychartXYSeriesConfigY().matcher(xychart.MatcherConfig().id("byName").options(y[1])))
    panel = panel.mapping(xy.SeriesMapping.MANUAL).series([one]).legend(_legend()).tooltip(_tooltip())
    join = model.DataTransformerConfig(id_val="joinByField", options={"byField": "Time", "mode": "inner"})
    return _with_targets(panel.with_transformation(join), [x, y])


def make_dashboard(title: str, uid: str, description: str, sections: Sequence[Section]) -> model.Dashboard:
    """Lay sections out as rows and number the panels."""
    board = dashboard.Dashboard(title).uid(uid).description(description).tags(["etserve"]).refresh("10s")
    board = board.time("now-30m", "now").timezone("browser").tooltip(model.DashboardCursorSync.CROSSHAIR).readonly()
    board = board.link(_dashboards_link()).annotation(_annotation()).variables(_variables())
    number = 0
    for name, panels in sections:
        number += 1
        board = board.with_row(dashboard.Row(name).id(number))
        for panel in panels:
            number += 1
            board = board.with_panel(panel.id(number))  # type: ignore[attr-defined]
    return board.build()


def _variables() -> list[cog.Builder[model.VariableModel]]:
    def chosen(name: str, label: str, definition: str, description: str) -> cog.Builder[model.VariableModel]:
        variable = dashboard.QueryVariable(name).label(label).description(description).datasource(SOURCE)
        variable = variable.query({"query": definition, "refId": name}).multi(True).include_all(True)
        variable = variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
            model.VariableSort.ALPHABETICAL_ASC
        )
        return variable.current(model.VariableOption(text="All", value="$__all", selected=True))

    servers = 'label_values(etserve_build_info{model_name=~"$model"}, instance)'
    return [
        dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        chosen("model", "Model", "label_values(etserve_build_info, model_name)", "Name under which a model is served."),
        chosen("instance", "Server", servers, "Servers of the chosen models."),
    ]


def _annotation() -> cog.Builder[model.AnnotationQuery]:
    annotation = dashboard.AnnotationQuery().name("Alerts").datasource(SOURCE).enable(True).icon_color("red")
    return annotation.expr('ALERTS{alertname=~"Etserve.*", alertstate="firing"}')


def _dashboards_link() -> cog.Builder[model.DashboardLink]:
    link = dashboard.DashboardLink("etserve").type(model.DashboardLinkType.DASHBOARDS).tags(["etserve"])
    return link.keep_time(True).include_vars(True)


def _thresholds(steps: Sequence[tuple[float, str]]) -> cog.Builder[model.ThresholdsConfig]:
    found = [model.Threshold(value=None, color="green")]
    found += [model.Threshold(value=start, color=color) for start, color in steps]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.LIST).calcs(["lastNotNull"])
    return legend.placement(kinds.LegendPlacement.BOTTOM).show_legend(True)


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING)


def _target(expr: str, legend: str, ref_id: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expr).legend_format(legend).range().ref_id(ref_id)


def _with_targets(panel: Panel, queries: Sequence[Query]) -> Panel:
    for index, (expr, legend) in enumerate(queries):
        panel = panel.with_target(_target(expr, legend, chr(ord("A") + index)))  # type: ignore[attr-defined]
    return panel
