# A login shell starts over with PATH (/etc/profile): put the platform's back.
export LANG="${LANG:-C.UTF-8}"
PATH="/vercel/bin:/vercel/runtimes/node24/bin:/vercel/runtimes/python/bin:$HOME/.local/bin:/vercel/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
export PATH
