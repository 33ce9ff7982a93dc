package dnsproxy

import (
	"net"
	"testing"

	"github.com/miekg/dns"
)

// BenchmarkQuery compares asking the resolver with asking the proxy before it.
func BenchmarkQuery(b *testing.B) {
	r := serve(b, zone(b, "www.example.com. 60 CNAME cdn.example.net.", "cdn.example.net. 60 A 192.0.2.1", "cdn.example.net. 60 A 192.0.2.2"))
	box := open(b, proxy(b, Config{Upstreams: []string{r.addr()}, Limits: Limits{Rate: 1e9, Burst: 1 << 30}}), "pypi *.example.com:443 !tracker.example 10.0.0.0/8")
	for _, c := range []struct{ name, addr, host string }{
		{"direct", r.addr(), "www.example.com"}, {"proxied", box.udp, "www.example.com"}, {"denied", box.udp, "www.example.org"},
	} {
		b.Run(c.name, func(b *testing.B) {
			conn, err := net.Dial("udp", c.addr)
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			wire, buf := pack(b, ask(c.host, dns.TypeA)), make([]byte, 4096)
			for b.Loop() {
				conn.Write(wire)
				if _, err := conn.Read(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
