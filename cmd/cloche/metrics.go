package main

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/cloche-dev/cloche/control"
)

// metrics is what /metrics shows. Labels have few values: no name of a tenant's.
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.HistogramVec
}

func newMetrics(s *server) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "cloche_http_request_duration_seconds",
			Help:    "Time from a request's head to the end of its answer, streams included.",
			Buckets: []float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30, 300},
		}, []string{"route", "status"}),
	}
	m.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		m.requests,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "cloche_sessions_running", Help: "Sessions that have a machine on this host.",
		}, func() float64 { return float64(s.node.Running()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "cloche_disk_free_ratio", Help: "Free share of the data directory's file system.",
		}, s.freeDisk),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "cloche_build_info", Help: "1, with the version.",
			ConstLabels: prometheus.Labels{"version": version, "driver": s.driver.Name()},
		}, func() float64 { return 1 }),
	)
	for _, c := range []struct {
		name, help string
		value      func(control.Stats) int64
	}{
		{"created", "Sandboxes created.", func(s control.Stats) int64 { return s.Created }},
		{"create_failed", "Sandboxes that could not be created.", func(s control.Stats) int64 { return s.CreateFailed }},
		{"refused", "Creations and resumptions refused by a limit of this host.", func(s control.Stats) int64 { return s.Refused }},
		{"stopped", "Sessions ended on request.", func(s control.Stats) int64 { return s.Stopped }},
		{"timed_out", "Sessions ended by their timeout.", func(s control.Stats) int64 { return s.TimedOut }},
		{"aborted", "Sessions whose machine ended by itself.", func(s control.Stats) int64 { return s.Aborted }},
	} {
		m.registry.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{Name: "cloche_" + c.name + "_total", Help: c.help},
			func() float64 { return float64(c.value(s.control.Stats())) }))
	}
	return m
}

// observe is called for each answered request.
func (m *metrics) observe(route string, status int, d time.Duration) {
	m.requests.WithLabelValues(route, strconv.Itoa(status)).Observe(d.Seconds())
}

// freeDisk is a share, 0 if it cannot be read.
func (s *server) freeDisk() float64 {
	free, total, err := s.base.dir.disk()
	if err != nil {
		return 0
	}
	return float64(free) / float64(total)
}
