package ingress

import (
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// PathForm begins the paths of addresses that need no name of their own:
// /p/SANDBOX/PORT/TOKEN/.
const PathForm = "/p/"

// tokenMark begins the paths of addresses with a name of their own that bear a
// token: PORT-SANDBOX.DOMAIN/~TOKEN/.
const tokenMark = "/~"

// Visit is a request for a server in a sandbox.
type Visit struct {
	Target
	token  string // that it bears, "" for none
	prefix string // of its path, which is not the server's affair
	host   bool   // whether the server has a name of its own
	rest   string // of the path, as it was written, from the slash on
}

// domainName is a DNS name of at least two labels.
var domainName = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// CheckDomain reports what is wrong with a domain for sandboxes, "" being right.
func CheckDomain(domain string) error {
	if domain == "" {
		return nil
	}
	name, port := splitPort(domain)
	n, err := strconv.ParseUint(port, 10, 16)
	if !domainName.MatchString(name) || len(name) > 200 || hasPort(domain) && (err != nil || n == 0) {
		return fmt.Errorf("domain %q: want a name such as sandboxes.example.com, in lower case, with or without a port", domain)
	}
	return nil
}

// Wildcard returns the name that a certificate for a domain's servers is for.
func Wildcard(domain string) string {
	name, _ := splitPort(domain)
	return "*." + name
}

// Address returns the address of a target, "https://…/". domain is that of the
// names of sandboxes, with a port if it is not the API's, or "" for the form of
// addresses that needs none; host is by what the caller reached the API.
func Address(t Target, token, domain, host string) string {
	if domain == "" {
		return "https://" + host + PathForm + string(t.Sandbox) + "/" + strconv.Itoa(t.Port) + "/" + token + "/"
	}
	if _, port := splitPort(host); port != "" && !hasPort(domain) {
		domain = net.JoinHostPort(domain, port)
	}
	return "https://" + strconv.Itoa(t.Port) + "-" + string(t.Sandbox) + "." + domain + tokenMark + token + "/"
}

// Token returns the token that a visit's address bears, "" for none.
func (v Visit) Token() string { return v.token }

// Find returns the visit that a request is, if it is one. One that names a
// sandbox's server badly is a visit of the zero Target.
func Find(r *http.Request, domain string) (Visit, bool) {
	path := r.URL.EscapedPath()
	if name, ok := nameBelow(r.Host, domain); ok {
		v := Visit{host: true, rest: path}
		v.Target = parseName(name)
		if after, ok := strings.CutPrefix(path, tokenMark); ok {
			v.token, v.rest = cutRest(after)
			v.prefix = tokenMark + v.token
		}
		return v, true
	}
	after, ok := strings.CutPrefix(path, PathForm)
	if !ok {
		return Visit{}, false
	}
	v := Visit{}
	id, after, _ := strings.Cut(after, "/")
	port, after, _ := strings.Cut(after, "/")
	v.Target = parseTarget(port, id)
	v.token, v.rest = cutRest(after)
	v.prefix = PathForm + id + "/" + port + "/" + v.token
	return v, true
}

// cutRest cuts the first part off a path; what follows keeps its slash.
func cutRest(path string) (first, rest string) {
	if i := strings.IndexByte(path, '/'); i >= 0 {
		return path[:i], path[i:]
	}
	return path, ""
}

// nameBelow returns the name before the domain in a Host header.
func nameBelow(host, domain string) (string, bool) {
	if domain == "" {
		return "", false
	}
	host, _ = splitPort(host)
	domain, _ = splitPort(domain)
	return strings.CutSuffix(strings.ToLower(host), "."+strings.ToLower(domain))
}

// parseName reads "PORT-SANDBOX".
func parseName(name string) Target {
	port, id, _ := strings.Cut(name, "-")
	return parseTarget(port, id)
}

// parseTarget returns the zero Target for what is none.
func parseTarget(port, id string) Target {
	n, err := strconv.ParseUint(port, 10, 16)
	sb, idErr := sandbox.ParseID(id)
	if err != nil || idErr != nil || n == 0 || port[0] == '0' {
		return Target{}
	}
	return Target{sb, int(n)}
}

// splitPort takes the port off a host, if it has one.
func splitPort(host string) (name, port string) {
	if !hasPort(host) {
		return host, ""
	}
	i := strings.LastIndexByte(host, ':')
	return host[:i], host[i+1:]
}

func hasPort(host string) bool {
	i := strings.LastIndexByte(host, ':')
	return i >= 0 && !strings.HasSuffix(host, "]") && (strings.Count(host, ":") == 1 || strings.HasPrefix(host, "["))
}

// origin is what a browser calls the place of a visit.
func origin(r *http.Request) string { return "https://" + r.Host }
